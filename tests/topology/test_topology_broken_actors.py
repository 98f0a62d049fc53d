"""Actors that take no calls any more are replaced in ``sync`` too, where nobody else watches."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from flow_parts import LOOSE, QUICK, wired

from hotpot.config import Recipe
from hotpot.rollout.actors import ActorState, InlineActors


@pytest.mark.parametrize("over_issue", [0.0, 0.5])
def test_a_broken_actor_is_replaced_while_sync_collects(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, over_issue: float
) -> None:
    with wired(recipe(*QUICK, *LOOSE, f"actors.over_issue={over_issue}", "actors.actors_per_group=2")) as (
        session,
        _,
    ):
        states = InlineActors.states

        def one_is_broken(actors: InlineActors) -> list[ActorState]:
            return [
                replace(one, broken="too many calls hang") if one.actor_id == "actor-1" else one
                for one in states(actors)
            ]

        monkeypatch.setattr(InlineActors, "states", one_is_broken)
        batch = session.collect(session.begin_update())
        assert [one.actor_id for one in session.rollout.actors.states()] == ["actor-0", "actor-1.1"]
        assert len(batch.collected) == 16
