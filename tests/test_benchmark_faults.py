"""The benchmark of faults: its list is whole, its judge is not fooled, and a few cases are tried for real."""

import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hotpot.testing.faults import EXIT_CODE, Bite, Fault, Kind

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's module."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    import faults

    return faults


def ended(faults: ModuleType, code: int | None, output: str = "", *kinds: Kind) -> Any:
    bites = tuple(
        Bite(fault=0, kind=kind.value, place="engine_step", pid=1, process="main", thread="main", time_s=0.0)
        for kind in kinds
    )
    return faults.runs.Ended(code=code, output=output, bites=bites, seconds=1.0, survivors=False)


def case_of(name: str) -> Any:
    from faults_parts.cases import chosen

    ((_, case),) = chosen([name], ["sync"])
    return case


def test_every_kind_of_fault_and_every_part_is_on_the_list(faults: ModuleType) -> None:
    from faults_parts.cases import TOPOLOGIES, cases, chosen

    every = list(cases())
    assert len({case.name for case in every}) == len(every)
    assert {fault.kind for case in every for fault in (*case.faults, *case.on_resume)} == set(Kind)
    parts = {fault.part for case in every for fault in case.faults}
    assert {"environment", "engine", "learner", "checkpoint", "log", "ledger", "lake"} <= parts
    assert all(len(chosen([], [topology])) > 80 for topology in TOPOLOGIES)
    assert [case.name for _, case in chosen(["engine_step/cr"], ["sync"])] == ["engine_step/crash"]


def test_each_turn_bites_at_another_pass(faults: ModuleType) -> None:
    case = case_of("engine_step/crash")
    ats = [case.at(turn, 0).faults[0].at for turn in range(3)]
    assert len(set(ats)) == 3
    assert case.at(7, 1) == case.at(7, 1)


TRACEBACK = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("code", "output", "kinds", "wanted"),
    [
        (None, "", (), "hung"),
        (1, "failed: the engine is gone", (), "stopped_with_culprit"),
        (1, "failed: something is wrong", (), "stopped_unnamed"),
        (1, "failed: injected: crash at engine_step:1", (), "stopped_unnamed"),
        (1, "failed: the engine broke (step failed: 3)", (), "stopped_with_culprit"),
        (1, "the engine began\nfailed: out of luck", (), "stopped_unnamed"),
        (1, f"failed: the engine is gone\n{TRACEBACK}\nx", (), "stopped_unnamed"),
        (1, f"{TRACEBACK}\nengine.py", (), "stopped_with_culprit"),
        (1, f"the engine began\n{TRACEBACK}\nx", (), "stopped_unnamed"),
        (1, f"{TRACEBACK}\nx\nIn the engine's process:\n{TRACEBACK}\nx", (), "stopped_with_culprit"),
        (-9, "", (Kind.KILL,), "stopped_with_culprit"),
        (EXIT_CODE, "", (Kind.EXIT,), "stopped_with_culprit"),
        (-9, "", (Kind.CRASH,), "stopped_unnamed"),
        (0, "", (), "stopped_unnamed"),  # it says it ended well, and no update is recorded
    ],
)
def test_the_judge_asks_for_the_name(
    faults: ModuleType, tmp_path: Path, code: int | None, output: str, kinds: tuple[Kind, ...], wanted: str
) -> None:
    found = faults.verdict(
        ended(faults, code, output, *kinds), case_of("engine_step/crash"), tmp_path / "run"
    )
    assert found == wanted


def test_the_watchdogs_file_names_somebody_too_but_its_stacks_do_not(
    faults: ModuleType, tmp_path: Path
) -> None:
    told = tmp_path / "logs" / "watchdog.json"
    told.parent.mkdir()
    hung, case = ended(faults, 1, "hotpot: no progress"), case_of("engine_step/hang")
    told.write_text('{"culprit": "nobody", "stacks": ["engine.py"]}')
    assert faults.verdict(hung, case, tmp_path) == "stopped_unnamed"
    told.write_text('{"culprit": "engine", "stacks": []}')
    assert faults.verdict(hung, case, tmp_path) == "stopped_with_culprit"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
        from faults_parts import runs

        folder = tmp_path_factory.mktemp("coin") / "model"
        runs.make_model(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("environment_step/crash", "ended_well"),
        ("environment_reset_answer/garbage", "ended_well"),
        ("lake_before_updates/fail", "ended_well"),
        ("engine_step/crash", "stopped_with_culprit"),
        ("learner_step/kill", "stopped_with_culprit"),
        ("before_ledger/crash", "stopped_with_culprit"),
        ("environment_version/upgrade_before_resume", "stopped_with_culprit"),
    ],
)
def test_a_case_is_tried(
    faults: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wanted: str
) -> None:
    monkeypatch.setattr(faults.runs, "DEADLINE_S", 240.0)
    outcome = faults.attempt(model, tmp_path / "case", "sync", case_of(name).at(1, 0), 1, keep=False)
    assert outcome.verdict == wanted, outcome.said
    assert (outcome.bitten, outcome.resumed, outcome.survivors) == (True, True, False), outcome.said
    assert outcome.unbalanced == ()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_out_of_balance_and_a_hang_are_found(
    faults: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults.runs, "DEADLINE_S", 240.0)
    plain = faults.runs.start(tmp_path / "plain", model, "sync", (), (), 0)
    assert (plain.code, plain.bites, plain.survivors) == (0, (), False), plain.output
    run = tmp_path / "plain" / "run"
    assert faults.imbalance(run, may_wait=False) == []
    with sqlite3.connect(run / "control.sqlite") as ledger:
        for state, purpose in (("leased", "training"), ("dropped", "evaluation")):
            ledger.execute(
                "UPDATE attempts SET state = ? WHERE rowid = (SELECT min(rowid) FROM attempts WHERE purpose = ? "
                "AND state = 'finished')",
                (state, purpose),
            )
    ledger.close()
    found = "\n".join(faults.imbalance(run, may_wait=False))
    for words in ("is still leased", "is on record and not finished", "is collected and not finished"):
        assert words in found

    hang = Fault(kind=Kind.HANG, place="environment_step")
    monkeypatch.setattr(faults.runs, "DEADLINE_S", 30.0)
    unwatched = ("supervision.stop_after_s=3600", "actors.call_timeout_s=3600")
    stuck = faults.runs.start(tmp_path / "stuck", model, "sync", (hang,), unwatched, 0)
    assert stuck.code is None
    assert [bite.kind for bite in stuck.bites] == ["hang"]
