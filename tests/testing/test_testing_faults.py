import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotpot.envs import load_environment
from hotpot.errors import EngineError, EnvironmentFailure, HotpotError, LearnerError
from hotpot.experience import crashpoints
from hotpot.experience.crashpoints import reach, through
from hotpot.rollout import boundary
from hotpot.rollout.clock import Clock
from hotpot.testing.coin import coin_environment
from hotpot.testing.engine import FakeEngine
from hotpot.testing.faults import (
    EXIT_CODE,
    Fault,
    FaultPlan,
    InjectedCrash,
    Kind,
    injected,
    read_bites,
)
from hotpot.types import Action, GenerationRequest, Purpose, SampleKey, SamplingParams, Split

Plan = Callable[..., FaultPlan]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    def make(*faults: Fault, seed: int = 0) -> FaultPlan:
        return FaultPlan(faults=faults, log=tmp_path / "bites", seed=seed)

    return make


def bitten(plan: FaultPlan) -> list[tuple[str, str]]:
    return [(bite.kind, bite.place) for bite in read_bites(plan.log)]


def play() -> None:
    """One episode over the boundary."""
    coin = coin_environment()
    environment = boundary.make(coin.make)
    boundary.reset(environment, coin.task(Split.TRAIN, 0, 0), 0)
    boundary.step(environment, Action(answer="heads"))
    boundary.close(environment)


def python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip


# ---- nothing unless asked for ----


def test_nothing_is_active_by_default() -> None:
    code = (
        "import sys, hotpot.envs, hotpot.experience\n"
        "from hotpot.experience import crashpoints\n"
        "value = object()\n"
        "crashpoints.reach('anything')\n"
        "assert crashpoints.through('anything_answer', value) is value\n"
        "sys.exit('hotpot.testing.faults' in sys.modules or crashpoints._injector is not None)"
    )
    found = python(code, {"HOTPOT_FAULTS": ""})
    assert found.returncode == 0, found.stderr


def test_the_block_leaves_nothing_behind(plan: Plan) -> None:
    step, clocks = FakeEngine.step, (time.time, time.monotonic)
    jump = Fault(kind=Kind.WALL_JUMP, place="here", seconds=1e6)
    with injected(plan(Fault(kind=Kind.FAIL, place="engine_step"), jump)):
        assert FakeEngine.step is not step
        assert time.time is not clocks[0]
    assert FakeEngine.step is step
    assert (time.time, time.monotonic) == clocks
    reach("here")
    assert crashpoints._injector is None


# ---- when and how often ----


def test_a_fault_bites_at_its_pass_and_as_often_as_it_says(plan: Plan) -> None:
    made = plan(Fault(kind=Kind.CRASH, place="here", at=3, times=2))
    with injected(made):
        crashed = []
        for number in range(1, 8):
            try:
                reach("here")
                reach("elsewhere")
            except InjectedCrash:
                crashed.append(number)
    assert crashed == [3, 4]
    assert bitten(made) == [("crash", "here")] * 2


def test_processes_share_the_number_of_bites(plan: Plan) -> None:
    made = plan(Fault(kind=Kind.CRASH, place="here", times=1))
    with injected(made), pytest.raises(InjectedCrash):
        reach("here")
    with injected(made):  # as a process started in the place of the one that crashed
        reach("here")
    assert len(read_bites(made.log)) == 1


def test_a_fault_may_be_for_some_processes_only(plan: Plan) -> None:
    name = multiprocessing.current_process().name
    made = plan(
        Fault(kind=Kind.SLOW, place="here", seconds=0.0, process="no such process"),
        Fault(kind=Kind.SLOW, place="here", seconds=0.0, process=name[1:]),
    )
    with injected(made):
        reach("here")
    assert [(bite.fault, bite.process) for bite in read_bites(made.log)] == [(1, name)]


def test_a_plan_survives_its_file_and_refuses_nonsense(plan: Plan, tmp_path: Path) -> None:
    made = plan(Fault(kind=Kind.HANG, place="here", at=2, times=None), seed=7)
    made.write(tmp_path / "plan.json")
    assert FaultPlan.read(tmp_path / "plan.json") == made
    with pytest.raises(ValueError, match="no value passes 'here'"):
        Fault(kind=Kind.GARBAGE, place="here")
    with pytest.raises(ValueError, match="count from 1"):
        Fault(kind=Kind.CRASH, place="here", at=0)


# ---- what each kind does ----


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("log_write", OSError),
        ("lake_before_updates", OSError),
        ("ledger_before_commit", sqlite3.OperationalError),
        ("environment_step", EnvironmentFailure),
        ("engine_step", EngineError),
        ("learner_step", LearnerError),
        ("actor_call", ConnectionResetError),
        ("elsewhere", HotpotError),
    ],
)
def test_a_failure_is_what_infrastructure_raises_there(plan: Plan, place: str, kind: type[Exception]) -> None:
    with injected(plan(Fault(kind=Kind.FAIL, place=place))), pytest.raises(kind, match=f"fail at {place}:1"):
        reach(place)


def test_what_died_stays_dead_in_all_its_calls(plan: Plan) -> None:
    made = plan(Fault(kind=Kind.DEATH, place="engine_step", at=2))
    engine = FakeEngine(lambda _: [1])
    with injected(made):
        engine.info()
        assert engine.step() == []
        for call in (engine.step, engine.info, engine.step):
            with pytest.raises(EngineError, match="death at engine_step:2"):
                call()
        reach("learner_step")
    assert len(read_bites(made.log)) == 1


def test_a_hang_holds_its_thread_and_no_other(plan: Plan) -> None:
    made = plan(Fault(kind=Kind.HANG, place="here"))
    with injected(made):
        stuck = threading.Thread(target=reach, args=("here",), daemon=True)
        stuck.start()
        deadline_s = time.monotonic() + 30
        while not read_bites(made.log) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        reach("here")
        assert bitten(made) == [("hang", "here")]
        assert stuck.is_alive()
    assert read_bites(made.log)[0].thread == stuck.name


def test_an_engine_that_breaks_stands_in_the_stack_itself(plan: Plan) -> None:
    engine = FakeEngine(lambda _: [1])
    with injected(plan(Fault(kind=Kind.CRASH, place="engine_step"))), pytest.raises(InjectedCrash) as found:
        engine.step()
    frames = [(entry.frame.f_globals["__name__"], entry.name) for entry in found.traceback]
    assert ("hotpot.testing.engine", "step") in frames


@pytest.mark.parametrize("kind", [Kind.WALL_JUMP, Kind.MONOTONIC_JUMP])
def test_clocks_jump_and_no_other(plan: Plan, kind: Kind) -> None:
    with injected(plan(Fault(kind=kind, place="here", seconds=1e6))):
        episodes = Clock()
        sources = (time.time, lambda: time.time_ns() / 1e9, time.monotonic, time.perf_counter, episodes.now_s)
        before = [source() for source in sources]
        reach("here")
        jumped = [source() - then > 1e5 for source, then in zip(sources, before, strict=True)]
    wall = kind is Kind.WALL_JUMP
    assert jumped == [wall, wall, not wall, not wall, not wall]


def test_an_upgrade_gives_the_environment_another_version(plan: Plan) -> None:
    made = plan(Fault(kind=Kind.UPGRADE, place="environment_version_answer", at=2))
    kind = "hotpot.testing.coin:SPEC"
    with injected(made):
        first, second, third = (load_environment(kind) for _ in range(3))
    assert first.env_version == third.env_version
    assert second.env_version.version == "coin@1+upgraded"
    assert second.reward_version == first.reward_version


@pytest.mark.parametrize("place", ["environment_reset_answer", "environment_step_answer"])
def test_garbage_of_an_environment_never_gets_through(plan: Plan, place: str) -> None:
    seen = set[str]()
    for seed in range(40):
        made = plan(Fault(kind=Kind.GARBAGE, place=place, times=None), seed=seed)
        made.log.unlink(missing_ok=True)
        with injected(made), pytest.raises(EnvironmentFailure, match="broke its contract"):
            play()
        seen.add(read_bites(made.log)[0].detail)
    assert len(seen) >= 7


def test_garbage_of_an_engine_waits_for_an_answer_to_spoil(plan: Plan) -> None:
    made = plan(Fault(kind=Kind.GARBAGE, place="engine_step_answer"), seed=3)
    engine = FakeEngine(lambda _: [9])
    request = GenerationRequest(
        request_id="one", session_id="one", prompt=np.array([1], dtype=np.int32), stop_tokens=frozenset({9}), max_tokens=4,
        purpose=Purpose.TRAINING, sampling=SamplingParams(), key=SampleKey(seed=0, issue=1, sample=0, step=0), sender="",
    )  # fmt: skip
    with injected(made):
        assert engine.step() == []
        assert bitten(made) == []
        engine.submit(request)
        (answer,) = engine.step()
    (bite,) = read_bites(made.log)
    assert bite.detail
    sound = (
        answer.request_id == "one"
        and len(answer.tokens) == len(answer.behaviour_logprobs) == sum(v.length for v in answer.versions)
        and bool((answer.behaviour_logprobs <= 0).all() and (answer.model_logprobs <= 0).all())
        and bool((answer.tokens < 512).all())
    )
    assert not sound


@pytest.mark.parametrize(
    "place", ["environment_make", "environment_reset", "environment_step", "environment_close"]
)
@pytest.mark.parametrize("kind", [Kind.CRASH, Kind.FAIL])
def test_the_boundary_of_environments_has_its_places(plan: Plan, place: str, kind: Kind) -> None:
    made = plan(Fault(kind=kind, place=place))
    with injected(made), pytest.raises(EnvironmentFailure, match="injected"):
        play()
    assert bitten(made) == [(kind, place)]


# ---- other processes ----

GO = "from hotpot.experience.crashpoints import reach; reach('here'); reach('here')"


@pytest.mark.parametrize(
    ("kind", "code"), [(Kind.EXIT, EXIT_CODE), (Kind.KILL, -signal.SIGKILL), (Kind.CRASH, 1)]
)
def test_a_process_obeys_the_plan_its_environment_names(
    plan: Plan, tmp_path: Path, kind: Kind, code: int
) -> None:
    made = plan(Fault(kind=kind, place="here", at=2))
    found = python(GO, made.write(tmp_path / "plan.json"))
    assert found.returncode == code, found.stderr
    assert bitten(made) == [(kind, "here")]


def test_so_do_the_processes_that_it_starts(plan: Plan, tmp_path: Path) -> None:
    made = plan(Fault(kind=Kind.EXIT, place="here", process="actor"))
    code = (
        "import multiprocessing\n"
        "from hotpot.experience.crashpoints import reach\n"
        "if __name__ == '__main__':\n"
        "    reach('here')\n"
        "    one = multiprocessing.get_context('forkserver').Process(target=reach, args=('here',), name='actor-0')\n"
        "    one.start(); one.join(50)\n"
        "    print(one.exitcode)\n"
    )
    found = python(code, made.write(tmp_path / "plan.json"))
    assert found.stdout.strip() == str(EXIT_CODE), found.stderr
    assert [bite.process for bite in read_bites(made.log)] == ["actor-0"]


def test_a_frozen_process_stands_still(plan: Plan, tmp_path: Path) -> None:
    made = plan(Fault(kind=Kind.FREEZE, place="here"))
    environment = {**os.environ, **made.write(tmp_path / "plan.json")}
    process = subprocess.Popen([sys.executable, "-c", GO], env=environment)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert bitten(made) == [("freeze", "here")]
    finally:
        process.kill()
        process.wait()


def test_a_value_passes_as_it_is_where_nothing_bites(plan: Plan) -> None:
    value: Any = object()
    with injected(plan(Fault(kind=Kind.GARBAGE, place="other_answer"))):
        assert through("here_answer", value) is value
