"""What the watch makes of how attempts ended: an environment rests, or the actor in which alone it fails is replaced."""

from types import SimpleNamespace
from typing import Any

import pytest

from hotpot.config.load import build_recipe
from hotpot.rollout.actors import ActorState
from hotpot.rollout.collection import AttemptEnd
from hotpot.topology.watch import Watch


class Actors:
    """Two actors, told by name, that take no calls."""

    def __init__(self) -> None:
        self.names, self.replaced = ["actor-0", "actor-1"], list[str]()

    def states(self) -> list[ActorState]:
        return [
            ActorState(actor_id=name, actor_group="group-0", progress=0, calls=0, since_s=None)
            for name in self.names
        ]

    def replace(self, actor_id: str, reason: str) -> str:
        assert actor_id in reason
        self.replaced.append(actor_id)
        self.names[self.names.index(actor_id)] = f"{actor_id}.1"
        return f"{actor_id}.1"


def made(actors: Actors, events: list[tuple[str, dict[str, Any]]], kind: str) -> Watch:
    settings = ["topology.kind=async", f"actors.kind={kind}", "actors.actors_per_group=2", "supervision.breaker_attempts=8"]  # fmt: skip
    version = SimpleNamespace(env_version=SimpleNamespace(version="env@1"))
    session: Any = SimpleNamespace(
        recipe=build_recipe({}, settings, origin="test"),
        environments=[SimpleNamespace(member=SimpleNamespace(name="env"), environment=version)],
        dog=SimpleNamespace(),
        store=SimpleNamespace(record=events.extend),
        event=lambda kind, detail: (kind, detail),
        view=SimpleNamespace(message=lambda text: None),
        rollout=SimpleNamespace(actors=actors),
    )
    nothing: Any = None
    return Watch(session, nothing, nothing)


def ends(actor: str, count: int, reason: str = "") -> list[AttemptEnd]:
    plan: Any = SimpleNamespace(environment="env")
    return [
        AttemptEnd(attempt_id=f"{actor}-{n}", plan=plan, actor_id=actor, reason=reason) for n in range(count)
    ]


@pytest.mark.parametrize(
    ("kind", "told"),
    [("threads", ["actor_blamed", "actor_replaced"]), ("inline", ["environment_breaker_opened"])],
)
def test_the_actor_in_which_alone_an_environment_fails_is_replaced(kind: str, told: list[str]) -> None:
    actors, events = Actors(), list[tuple[str, dict[str, Any]]]()
    watch = made(actors, events, kind)
    watch.ended(ends("actor-1", 3))
    watch.ended(ends("actor-0", 9, "it crashed"))
    assert [name for name, _ in events] == told
    assert actors.replaced == (["actor-0"] if kind == "threads" else [])
    assert watch.supervisor.replacements == len(actors.replaced)


def test_an_actor_that_is_gone_is_not_replaced_again() -> None:
    actors, events = Actors(), list[tuple[str, dict[str, Any]]]()
    watch = made(actors, events, "threads")
    watch.ended(ends("actor-1", 3))
    actors.names[0] = "actor-0.1"
    watch.ended(ends("actor-0", 9, "it crashed"))
    assert [name for name, _ in events] == ["actor_blamed"]
    assert actors.replaced == []
