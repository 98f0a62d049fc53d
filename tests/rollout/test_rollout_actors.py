"""What every kind of actors keeps: one reply for each call, failures with a reason, nothing left behind."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from actors_parts import Caller, calling, eventually, settings

from hotpot.rollout.actors import CallKind
from hotpot.rollout.actors.roster import Roster

PROCESSES = pytest.param("processes", marks=pytest.mark.slow)  # each starts an interpreter
KINDS = ("inline", "threads", PROCESSES)
WAITING = ("threads", PROCESSES)
"""Kinds that don't hang with an environment."""

WRONGS = {
    "raise": "step raised OSError: the tool server is down",
    "exit": "step raised SystemExit: 3",
    "subclass": "step returned Verbose, which adds ['note'] to StepResult",
    "unknown": "step raised KeyError: 'unknown'",
}

Make = Callable[..., Caller]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make callers, of a kind and with settings; what they leave behind fails the test."""
    before = threading.active_count()
    made: list[Iterator[Caller]] = []

    def make_one(kind: str, **changed: object) -> Caller:
        made.append(calling(kind, tmp_path, **changed))
        return next(made[-1])

    yield make_one
    for one in made:
        assert next(one, None) is None
    assert eventually(lambda: threading.active_count() == before)
    assert list(tmp_path.glob("open-*")) == []


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_an_episode_is_carried_out_call_by_call(kind: str, make: Make) -> None:
    caller = make(kind, actors_per_group=1)
    caller.open()
    opened = caller.reply()
    assert opened.observation is not None
    assert opened.observation.messages[0].content == "hello 7 é\n\x00"
    caller.step(told="print to stdout")
    stepped = caller.reply()
    assert stepped.result is not None
    assert (stepped.result.messages[0].content, stepped.failure) == ("did print to stdout", None)
    caller.step(told="done")
    done = caller.reply().result
    assert done is not None
    assert [(one.name, one.value, type(one.value)) for one in done.rewards] == [
        ("right", 0.1 + 0.2, float),
        ("steps", 2, int),
    ]
    assert caller.num_open() == 1
    caller.close()
    closed = caller.reply()
    assert (closed.kind, closed.observation, closed.result, closed.failure) == (
        CallKind.CLOSE,
        None,
        None,
        None,
    )
    assert caller.num_open() == 0
    assert caller.actors.ready(0) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_environment_does_wrong_is_a_failure_with_a_reason(kind: str, make: Make) -> None:
    caller = make(kind, actors_per_group=1)
    caller.open("neighbour")
    caller.reply()
    for told, reason in WRONGS.items():
        caller.open(told)
        caller.reply()
        caller.step(told, told)
        assert reason in caller.failure()
        caller.close(told)
        assert caller.reply().failure is None
    assert caller.num_open() == 1
    caller.step("neighbour")
    assert caller.reply().failure is None


@pytest.mark.parametrize("kind", KINDS)
def test_failures_of_opening_and_closing(kind: str, make: Make) -> None:
    caller = make(kind, actors_per_group=1)
    caller.open(told="raise", closing="raise")
    assert "reset raised OSError" in caller.failure()
    assert caller.num_open() == 1
    caller.close()
    assert "close raised OSError" in caller.failure()
    assert caller.num_open() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_close_has_the_last_word(kind: str, make: Make) -> None:
    caller = make(kind, actors_per_group=1)
    caller.open(told="sleep 0.05")
    caller.close()
    assert caller.reply().kind is CallKind.CLOSE
    caller.open("a1")
    caller.reply()
    caller.step("a1", "sleep 0.05")
    time.sleep(0.02)
    caller.close("a1")
    assert caller.reply().kind is CallKind.CLOSE
    assert caller.num_open() == 0
    caller.close("a1")
    assert caller.reply().failure is None
    assert caller.actors.ready(0.1) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_out_of_turn_is_the_callers_fault(kind: str, make: Make) -> None:
    caller = make(kind, actors_per_group=1)
    with pytest.raises(ValueError, match="a step can't begin now: attempt a0 has no environment"):
        caller.step()
    caller.open()
    with pytest.raises(ValueError, match="a step can't begin now: attempt a0 has a open under way"):
        caller.step()
    caller.reply()
    with pytest.raises(ValueError, match="a open can't begin now: attempt a0 has an environment"):
        caller.open()


@pytest.mark.parametrize("kind", KINDS)
def test_actors_are_dealt_in_turn_and_replaced_under_fresh_ids(kind: str, make: Make) -> None:
    caller = make(kind)
    actors = caller.actors
    assert [actors.assign("group-0") for _ in range(3)] == ["actor-0", "actor-1", "actor-0"]
    caller.open()
    caller.open("a1", actor="actor-1")
    caller.replies(2)
    assert actors.replace("actor-0", "no progress for 30 s") == "actor-0.1"
    assert [state.actor_id for state in actors.states()] == ["actor-0.1", "actor-1"]
    assert eventually(lambda: caller.num_open() == 1)
    caller.step()
    assert caller.failure() == "actor actor-0 was replaced: no progress for 30 s"
    caller.close()
    assert caller.reply().failure is None
    caller.open("a2")
    assert caller.failure() == "actor actor-0 was replaced: no progress for 30 s"
    caller.open("a3", actor="actor-0.1")
    assert caller.reply().failure is None
    caller.step("a1", actor="actor-1")
    assert caller.reply().failure is None
    assert actors.replace("actor-0.1", "again") == "actor-0.2"
    with pytest.raises(ValueError, match="was replaced"):
        actors.replace("actor-0", "once more")


def test_each_group_has_actors_of_its_own() -> None:
    roster = Roster.of(settings(groups=2))
    assert list(roster) == [
        ("actor-0", "group-0"),
        ("actor-1", "group-0"),
        ("actor-2", "group-1"),
        ("actor-3", "group-1"),
    ]
    assert [roster.deal("group-1") for _ in range(3)] == ["actor-2", "actor-3", "actor-2"]
    assert roster.deal("group-0") == "actor-0"
    assert roster.deal("group-1", lambda actor: actor != "actor-3") == "actor-2"
    with pytest.raises(ValueError, match="no actor group 'group-2'"):
        roster.deal("group-2")


@pytest.mark.parametrize("kind", WAITING)
@pytest.mark.parametrize("told", ["hang", "cancel"])
def test_a_call_beyond_its_deadline_says_where_it_hangs(kind: str, told: str, make: Make) -> None:
    caller = make(kind, call_timeout_s=1.5)
    caller.open()
    caller.replies()
    caller.step(told=told)
    reason = caller.failure()
    if told == "cancel":
        assert reason == "step raised CancelledError: "
    else:
        assert re.search(r"environment 'unruly' hung in step of attempt a0 for \d+\.\d s ", reason)
        assert (
            "(actors.call_timeout_s = 1.5) in actor-0: it stands in hang (rollout/actors_parts.py:" in reason
        )
    caller.close()
    assert caller.reply().failure is None
    caller.release()
    # The thread that was left behind closes the environment, and nothing more comes of it.
    assert eventually(lambda: caller.num_open() == 0)
    assert caller.actors.ready(0.05) == []


@pytest.mark.parametrize("kind", WAITING)
def test_a_close_behind_a_call_that_hangs(kind: str, make: Make) -> None:
    caller = make(kind, call_timeout_s=1.5, actors_per_group=1)
    caller.open()
    caller.replies()
    caller.hang()
    caller.close()
    reason = caller.failure()
    assert "hung in close of attempt a0" in reason
    assert "it stands in hang" in reason
    assert caller.num_open() == 1


@pytest.mark.parametrize("kind", WAITING)
def test_an_actor_with_too_many_hung_threads_takes_no_calls(kind: str, make: Make) -> None:
    caller = make(kind, call_timeout_s=1.5, max_hung=1)
    for attempt in ("a0", "a1"):
        caller.open(attempt, "hang")
    assert all("hung in open" in str(reply.failure) for reply in caller.replies(2))
    if kind == "processes":  # its hung calls are known in the child alone, which tells by a beat
        assert eventually(lambda: caller.actors.ready(0.01) == [] and bool(caller.actors.states()[0].broken))
    state, other = caller.actors.states()
    assert (
        state.broken == "actor-0 takes no calls: more than actors.max_hung = 1 of its threads hang in unruly"
    )
    assert other.broken == ""
    assert state.calls > 0
    caller.open("a2", actor="actor-0")
    caller.open("a4", actor="actor-0")
    caller.close("a4")
    assert caller.reply().failure is None
    assert caller.actors.ready(0) == []  # it waits for the replacement
    assert {caller.actors.assign("group-0") for _ in range(3)} == {"actor-1"}
    assert caller.actors.replace("actor-0", "too much hangs") == "actor-0.1"
    assert caller.failure().startswith("actor actor-0 was replaced: too much hangs")
    caller.open("a3", actor="actor-0.1")
    assert caller.reply().failure is None
    assert {caller.actors.assign("group-0") for _ in range(3)} == {"actor-0.1", "actor-1"}
    if kind == "processes":  # what hung was killed with its process, open as it was
        for mark in caller.folder.glob("open-*"):
            mark.unlink()


def test_an_actor_whose_threads_come_back_takes_calls_again(make: Make) -> None:
    caller = make("threads", call_timeout_s=1.5, max_hung=0)
    caller.open(told="hang")
    assert "hung in open" in caller.failure()
    caller.open("late")
    assert caller.failure().startswith("actor-0 takes no calls: more than actors.max_hung = 0")
    caller.open("held")
    caller.release()
    assert caller.reply().failure is None


@pytest.mark.parametrize("kind", WAITING)
def test_what_was_with_a_replaced_actor_fails_for_that_reason(kind: str, make: Make) -> None:
    caller = make(kind, actors_per_group=1)
    for attempt in ("a0", "a1"):
        caller.open(attempt)
    caller.replies(2)
    caller.hang()
    state = caller.actors.states()[0]
    assert (state.calls, state.progress) == (1, 2)
    caller.actors.replace("actor-0", "no progress for 30 s")
    assert caller.failure() == "actor actor-0 was replaced: no progress for 30 s"
    caller.close("a0")
    caller.close("a1")
    assert [one.failure for one in caller.replies(2)] == [None, None]
    caller.release()
    assert eventually(lambda: caller.num_open() == 0)


@pytest.mark.parametrize("kind", WAITING)
def test_environments_wait_side_by_side(kind: str, make: Make) -> None:
    """Sixteen that each wait for all the others' opening would never end one after the other."""
    caller = make(kind)
    for number in range(16):
        caller.open(f"a{number}", "hang", actor=f"actor-{number % 2}")
    assert eventually(lambda: caller.num_open() == 16)
    assert caller.actors.ready(0) == []
    assert [state.calls for state in caller.actors.states()] == [8, 8]
    caller.release()
    assert {one.failure for one in caller.replies(16)} == {None}


@pytest.mark.parametrize("kind", KINDS)
def test_many_episodes_with_random_delays_and_faults_are_each_answered_once(kind: str, make: Make) -> None:
    caller, rng = make(kind), Random(3)
    left = {f"a{number}": rng.randint(1, 4) for number in range(500)}
    actor_of = {attempt: f"actor-{rng.randrange(2)}" for attempt in left}
    waiting = list(left)
    under_way: dict[str, CallKind] = {}
    ends: list[str] = []
    while waiting or under_way:
        while waiting and len(under_way) < 64:
            attempt = waiting.pop()
            caller.open(attempt, told(rng), actor=actor_of[attempt])
            under_way[attempt] = CallKind.OPEN
        for reply in caller.actors.ready(1.0):
            attempt = reply.attempt_id
            assert under_way.pop(attempt) is reply.kind
            if reply.kind is CallKind.CLOSE:
                ends.append(attempt)
                continue
            left[attempt] -= 1
            if reply.failure is None and left[attempt] > 0:
                caller.step(attempt, told(rng), actor=actor_of[attempt])
                under_way[attempt] = CallKind.STEP
                if rng.random() > 0.1:
                    continue  # the others are closed in the midst of it
            under_way[attempt] = CallKind.CLOSE
            caller.close(attempt, actor=actor_of[attempt])
    assert sorted(ends) == sorted(left)
    assert caller.num_open() == 0
    assert caller.actors.ready(0) == []


def told(rng: Random) -> str:
    return rng.choice(["raise", "exit", *[f"sleep {rng.random() / 500}"] * 8])
