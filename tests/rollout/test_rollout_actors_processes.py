"""Actors in processes: what kills or garbles one is a failure of its calls, and nothing outlives the run."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from actors_parts import UNRULY, Caller, calling, eventually, settings, unruly

from hotpot.envs import bind, load_environment
from hotpot.errors import EnvironmentFailure, EnvironmentOverrideError, EnvironmentSpecError
from hotpot.rollout.actors import Call, CallKind, ProcessActors, Reply, worker
from hotpot.rollout.actors.channel import Channel
from hotpot.rollout.actors.codec import Answered, Asked, GarbageError, decode, encode
from hotpot.rollout.actors.sources import source_of
from hotpot.types import (
    Action,
    Message,
    Observation,
    Reward,
    Role,
    Split,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
)


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    before = open_files()
    yield from calling("processes", tmp_path, actors_per_group=1, call_timeout_s=20.0)
    assert open_files() == before


def processes(caller: Caller) -> ProcessActors:
    assert isinstance(caller.actors, ProcessActors)
    return caller.actors


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for doesn't."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.slow
def test_death_fails_every_call_and_the_actor_until_it_is_replaced(caller: Caller) -> None:
    """By its own hand, by a signal from outside, by garbage in the pipe: one after the other."""
    deaths = {
        "die": "the process of actor-0 ended with exit status 3 with 2 calls under way in unruly",
        "kill": "the process of actor-0.1 was killed by signal 9 (SIGKILL) with 2 calls under way in unruly",
        "garble": "actor-0.2 sent what is no message of it: not a frame: b'garbage",
    }
    actor = "actor-0"
    for told, reason in deaths.items():
        pid = processes(caller).pids()[actor]
        caller.open(f"{told}-hangs", actor=actor)
        caller.open(f"{told}-does", actor=actor)
        caller.replies(2)
        caller.step(f"{told}-hangs", "hang", actor=actor)
        assert eventually((caller.folder / "hanging").exists)
        caller.step(f"{told}-does", told, actor=actor)
        failures = [str(one.failure) for one in caller.replies(2)]
        assert all(failure.startswith(reason) for failure in failures), failures
        (state,) = caller.actors.states()
        assert state.broken.startswith(reason)
        assert (state.calls, state.since_s is None) == (1, False)
        caller.close(f"{told}-does", actor=actor)
        assert caller.reply().failure is None
        caller.open(f"{told}-late", actor=actor)
        assert caller.actors.assign("group-0") == actor  # there is no other
        gone, actor = actor, caller.actors.replace(actor, "it died")
        assert caller.failure().startswith(f"actor {gone} was replaced: it died ({reason}")
        caller.open(f"{told}-again", actor=actor)
        assert caller.reply().failure is None
        assert eventually(lambda pid=pid: caller.actors.ready(0) == [] and not lives(pid))
        (caller.folder / "hanging").unlink()
    for mark in caller.folder.glob("open-*"):
        mark.unlink()  # of environments that died with their process


@pytest.mark.slow
def test_a_process_that_holds_its_interpreter_or_ends_from_outside(caller: Caller) -> None:
    actors = processes(caller)
    first = actors.pids()["actor-0"]
    caller.open()
    caller.reply()
    caller.hang()
    os.kill(first, signal.SIGSTOP)  # it can do nothing any more, closing its environments neither
    assert actors.replace("actor-0", "no progress for 30 s") == "actor-0.1"
    assert caller.failure() == "actor actor-0 was replaced: no progress for 30 s"
    caller.open("a1", actor="actor-0.1")
    assert caller.reply().failure is None
    assert eventually(lambda: actors.ready(0.01) == [] and not lives(first))
    os.kill(actors.pids()["actor-0.1"], signal.SIGKILL)
    assert eventually(lambda: actors.ready(0.01) == [] and "signal 9" in actors.states()[0].broken)
    caller.step("a1", actor="actor-0.1")
    assert "was killed by signal 9 (SIGKILL)" in caller.failure()


@pytest.mark.slow
def test_one_that_stands_still_is_given_up_beyond_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LATE_S", 0.5)
    for caller in calling("processes", tmp_path, actors_per_group=1, call_timeout_s=0.5):
        os.kill(processes(caller).pids()["actor-0"], signal.SIGSTOP)
        caller.open()
        assert caller.failure().startswith("actor-0 stands still: ")
        assert "the open of attempt a0 in environment 'unruly'" in caller.actors.states()[0].broken


@pytest.mark.slow
def test_an_environment_that_holds_the_interpreter_ends_its_process_with_all_stacks(tmp_path: Path) -> None:
    actors = ProcessActors(
        {"unruly": unruly()}, settings(actors_per_group=1, call_timeout_s=0.5), logs=tmp_path
    )
    with contextlib.closing(actors):
        caller = Caller(actors, tmp_path)
        caller.open(told="hold")
        assert caller.failure() == (
            "the process of actor-0 ended with exit status 1 with 1 calls under way in unruly; see logs/actor-0.log"
        )
        assert "in hold" in (tmp_path / "actor-0.log").read_text()


@pytest.mark.slow
def test_a_child_whose_parent_was_killed_ends_by_itself(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from actors_parts import Caller, make_actors\n"
        "caller = Caller(make_actors('processes', actors_per_group=1), pathlib.Path(sys.argv[1]))\n"
        "caller.open(); caller.reply(); caller.hang()\n"
        "print(caller.actors.pids()['actor-0'], flush=True)\n"
        "time.sleep(60)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert lives(child)
        parent.kill()
    assert eventually(lambda: not lives(child))


LOADS_FOR_EVER = """
import os, pathlib, sys, time
if "hotpot.rollout.actors.child" in sys.modules:
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(1000)
"""


def test_a_child_whose_parent_is_killed_while_it_makes_its_environments_ends(tmp_path: Path) -> None:
    source = Path(__file__).with_name("actors_parts.py").read_text()
    (tmp_path / "loads_for_ever.py").write_text(source + LOADS_FOR_EVER)
    program = (
        "from actors_parts import settings\n"
        "from hotpot.envs import load_environment\n"
        "from hotpot.rollout.actors import ProcessActors\n"
        "slow = load_environment('loads_for_ever:UNRULY', {})\n"
        "ProcessActors({'slow': slow}, settings(actors_per_group=1))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(tmp_path), *filter(None, sys.path)])
    child = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}) as parent:
        try:
            assert eventually(lambda: child.is_file() and bool(child.read_text()))
        finally:
            parent.kill()
    assert eventually(lambda: not lives(int(child.read_text())))


def test_environments_that_are_never_ready_have_a_deadline_and_until_then_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(__file__).with_name("actors_parts.py").read_text()
    (tmp_path / "never_ready.py").write_text(source + LOADS_FOR_EVER)
    monkeypatch.syspath_prepend(tmp_path)
    never, turns = load_environment("never_ready:UNRULY", {}), []
    complaint = r"actor-0 had no environments ready after 0\.5 s \(actors\.start_timeout_s\)"
    with pytest.raises(EnvironmentSpecError, match=complaint):
        ProcessActors(
            {"never": never},
            settings(actors_per_group=1, start_timeout_s=0.5),
            starting=lambda: turns.append(1),
        )
    assert turns


@pytest.mark.slow
def test_what_children_print_goes_to_a_log_of_their_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    actors = ProcessActors({"unruly": unruly()}, settings(actors_per_group=1), logs=tmp_path)
    with contextlib.closing(actors):
        caller = Caller(actors, tmp_path)
        caller.open(told="print out of the way")
        assert caller.reply().failure is None
        caller.hang()
        actors.replace("actor-0", "it hangs")
        assert "replaced: it hangs" in caller.failure()
        log = tmp_path / "actor-0.log"
        assert eventually(lambda: actors.ready(0.01) == [] and "in hang" in log.read_text())
        assert log.read_text().startswith("out of the way\n")
    assert capfd.readouterr() == ("", "")


def test_another_version_in_the_child_is_refused_by_name(tmp_path: Path) -> None:
    here = bind(replace(UNRULY, declared="2"), {})
    changed = replace(unruly(), env_version=here.env_version)
    with pytest.raises(EnvironmentSpecError) as refused:
        ProcessActors({"desk": changed}, settings(actors_per_group=1))
    text = str(refused.value)
    assert text.startswith(
        f"actor-0 is not fit: environment 'desk' is version {unruly().env_version} in actor-0"
    )
    assert f"and {here.env_version} in the run" in text
    with pytest.raises(EnvironmentSpecError, match="can't be made in another process: it is not installed"):
        ProcessActors({"desk": here}, settings(actors_per_group=1))


def test_a_child_imports_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers'}"
    program = f"import sys, hotpot.rollout.actors.child; print(sorted({heavy} & sys.modules.keys()))"
    path = os.pathsep.join(filter(None, sys.path))
    found = subprocess.check_output([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path})
    assert found.decode().strip() == "[]"


def test_an_installed_environment_goes_by_its_name() -> None:
    source = source_of("desk", load_environment("order_desk"))
    assert (source.name, source.kind) == ("desk", "order_desk")
    assert source_of("unruly", unruly()).kind == "actors_parts:UNRULY"
    late = load_environment("hotpot.testing.latency:ORDER_DESK")
    assert source_of("late", late).kind == "hotpot.testing.latency:ORDER_DESK"


TASK = Task(env="unruly", split=Split.HOLDOUT, content='{"a":"\ud800é\x00"}')
OPENING = Observation(
    messages=(Message(role=Role.USER, content="é\n\u2028\ud800"),),
    tools=(ToolSpec(name="echo", description="", parameters="{}"),),
)
RESULT = StepResult(
    messages=(
        Message(role=Role.TOOL, content="", name="echo"),
        Message(role=Role.USER, content="x", tool_calls=(ToolCall(name="echo", arguments="{}"),)),
    ),
    rewards=(
        Reward(name="right", value=0.1 + 0.2),
        Reward(name="steps", value=2),
        Reward(name="tiny", value=5e-324),
    ),
    done=True,
    success=False,
    tool_error=True,
)


def call(kind: CallKind, **fields: object) -> Call:
    return Call(kind=kind, attempt_id="a", environment="e", actor_id="actor-0", **fields)  # type: ignore[arg-type]


def reply(**fields: object) -> Reply:
    return Reply(kind=CallKind.STEP, attempt_id="a", seconds=1 / 3, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said",
    [
        Asked(ticket=0, call=call(CallKind.OPEN, task=TASK, seed=2**63)),
        Asked(
            ticket=2**40,
            call=call(CallKind.STEP, action=Action(tool_call=ToolCall(name="n", arguments="{}"))),
        ),
        Asked(ticket=1, call=call(CallKind.STEP, action=Action(answer=""))),
        Asked(ticket=1, call=call(CallKind.CLOSE)),
        Answered(ticket=1, reply=reply(observation=OPENING)),
        Answered(ticket=1, reply=reply(result=RESULT)),
        Answered(ticket=1, reply=reply()),
    ],
)
def test_messages_come_back_as_they_were(said: Asked | Answered) -> None:
    back = decode(encode(said))
    assert back == said
    if isinstance(back, Answered) and back.reply.result is not None:
        assert [type(one.value) for one in back.reply.result.rewards] == [float, int, float]


def test_failures_keep_their_kind() -> None:
    class Own(EnvironmentOverrideError):
        """A user's own."""

    for failure, kind in (
        (EnvironmentFailure("é"), EnvironmentFailure),
        (Own("x"), EnvironmentOverrideError),
    ):
        back = decode(encode(Answered(ticket=1, reply=reply(failure=failure))))
        assert isinstance(back, Answered)
        assert type(back.reply.failure) is kind
        assert str(back.reply.failure) == str(failure)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b'["Nothing",[]]',
        b'["Beat",[1]]',
        b'["Beat",[true,""]]',
        b'["Asked",[1,["shout","a","e","x",null,0,null]]]',
        b"[" * 10_000,
        b"\xff",
        # An action that is neither a call nor an answer.
        b'["Asked",[1,["step","a","e","x",null,0,[null,null,null]]]]',
    ],
)
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(GarbageError):
        decode(payload)


def test_a_channel_keeps_frames_whole_and_stops_at_a_fault() -> None:
    left, right = socket.socketpair()
    ours, theirs = Channel(left), Channel(right)
    large = Asked(ticket=7, call=call(CallKind.STEP, action=Action(answer="x" * 2_000_000)))
    ours.send(large)
    assert ours.unsent
    found = []
    while not found:
        ours.flush()
        found += theirs.receive()
    assert found == [large]
    ours.send(Asked(ticket=8, call=call(CallKind.CLOSE)))
    left.send(b"garbage garbage")
    assert [one.ticket for one in theirs.receive() if isinstance(one, Asked)] == [8]
    assert theirs.fault.startswith("not a frame: b'garbage")
    ours.send(Asked(ticket=9, call=call(CallKind.CLOSE)))
    assert theirs.receive() == []
    ours.close()
    theirs.receive()
    assert theirs.ended
    theirs.close()


def test_a_flipped_bit_is_a_fault() -> None:
    left, right = socket.socketpair()
    sender, receiver = Channel(left), Channel(right)
    sender.send(Asked(ticket=8, call=call(CallKind.CLOSE)))
    frame = bytearray(right.recv(1000))
    frame[-3] ^= 1
    left.send(frame)
    assert receiver.receive() == []
    assert "wrong checksum" in receiver.fault
    sender.close()
    receiver.close()
