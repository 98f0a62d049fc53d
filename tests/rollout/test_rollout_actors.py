"""What every kind of actors keeps: one reply for each call, failures with a reason, nothing left behind."""

from dataclasses import replace

import pytest
from rollout_parts import ScriptedEnvironment, call, done, reply

from hotpot.config import ActorsSection
from hotpot.errors import EnvironmentFailure
from hotpot.rollout.actors import Call, CallKind, InlineActors
from hotpot.types import Split, Task

OPEN = Call(
    kind=CallKind.OPEN,
    attempt_id="a0",
    environment="scripted",
    actor_id="actor-0",
    task=Task(env="scripted", split=Split.TRAIN, content="{}"),
)
STEP = replace(OPEN, kind=CallKind.STEP, task=None, action=call())
CLOSE = replace(OPEN, kind=CallKind.CLOSE, task=None)


def raising() -> object:
    raise OSError("the tool server is down")


def inline(*results: object) -> tuple[InlineActors, list[ScriptedEnvironment]]:
    made: list[ScriptedEnvironment] = []

    def make() -> ScriptedEnvironment:
        made.append(ScriptedEnvironment(results))
        return made[-1]

    settings = ActorsSection(groups=2, actors_per_group=2)
    return InlineActors({"scripted": make}, settings), made


def test_inline_calls_are_answered_in_the_order_they_were_begun() -> None:
    actors, made = inline(reply(), done())
    for one in (OPEN, replace(OPEN, attempt_id="a1"), STEP, STEP, CLOSE):
        actors.begin(one)
    replies = actors.ready(0)
    # What a0 had not taken before it was closed, it does not get.
    assert [(one.attempt_id, one.kind) for one in replies] == [("a1", CallKind.OPEN), ("a0", CallKind.CLOSE)]
    assert [environment.closed for environment in made] == [1, 0]
    actors.close()
    assert [environment.closed for environment in made] == [1, 1]
    assert actors.ready(0) == []


def test_inline_failures_come_back_and_the_environment_is_closed_once() -> None:
    actors, made = inline(raising)
    for one in (OPEN, STEP):
        actors.begin(one)
    opened, failed = actors.ready(0)
    assert opened.observation is not None
    assert isinstance(failed.failure, EnvironmentFailure)
    assert "step raised OSError: the tool server is down" in str(failed.failure)
    actors.begin(CLOSE)
    actors.begin(CLOSE)
    assert [one.failure for one in actors.ready(0)] == [None, None]
    assert made[0].closed == 1
    actors.begin(STEP)
    assert "a0 has no open environment" in str(actors.ready(0)[0].failure)


def test_inline_actors_are_dealt_in_turn_and_replaced_under_fresh_ids() -> None:
    actors, made = inline(reply(), reply())
    assert [actors.assign("group-1") for _ in range(3)] == ["actor-2", "actor-3", "actor-2"]
    assert actors.assign("group-0") == "actor-0"
    actors.begin(OPEN)
    assert actors.ready(0)[0].failure is None
    assert actors.replace("actor-0", "no progress for 30 s") == "actor-0.1"
    assert made[0].closed == 1
    assert [state.actor_id for state in actors.states()] == ["actor-0.1", "actor-1", "actor-2", "actor-3"]
    for one in (STEP, CLOSE):
        actors.begin(one)
    (closed,) = actors.ready(0)
    assert closed.failure is None
    actors.begin(replace(OPEN, attempt_id="a1"))
    assert str(actors.ready(0)[0].failure) == "actor actor-0 was replaced: no progress for 30 s"
    assert actors.replace("actor-0.1", "again") == "actor-0.2"
    with pytest.raises(ValueError, match="was replaced"):
        actors.replace("actor-0", "once more")
    with pytest.raises(ValueError, match="no actor group 'group-2'"):
        actors.assign("group-2")


def test_an_attempt_is_opened_once() -> None:
    actors, _ = inline()
    actors.begin(OPEN)
    with pytest.raises(ValueError, match="open already"):
        actors.begin(OPEN)
