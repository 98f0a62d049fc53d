"""A process that gets nowhere is ended with the culprit's name, whatever it hangs in; one that gets on never is."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotpot.errors import RunFolderError
from hotpot.topology.supervision.verdict import (
    Verdict,
    read_verdict,
    set_aside,
    stacks_path,
    verdict_path,
    write_verdict,
)

WORKER = Path(__file__).with_name("topology_watchdog_worker.py")
PATIENCE_S = 60.0


def start(case: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), case, str(folder)], stderr=subprocess.PIPE, text=True
    )


def ended(case: str, folder: Path) -> tuple[int, str]:
    process = start(case, folder)
    _, told = process.communicate(timeout=PATIENCE_S)
    return process.returncode, told


@pytest.mark.parametrize("case", ["lock", "c"])
def test_a_main_thread_that_hangs_is_named_by_its_span(case: str, tmp_path: Path) -> None:
    code, told = ended(case, tmp_path)
    found = read_verdict(tmp_path)
    assert code == 1
    assert found is not None
    assert (found.culprit, found.spans, found.turning) == ("store", ("learn", "store"), False)
    assert found.silent_s >= 2.0
    assert "waits for store" in told.splitlines()[-1]
    assert "--resume" in told
    text = stacks_path(tmp_path).read_text()
    assert "topology_watchdog_worker.py" in text
    assert "_watch" in text


def test_what_hangs_before_there_is_a_run_folder_is_ended_too(tmp_path: Path) -> None:
    code, told = ended("opening", tmp_path / "run")
    assert code == 1
    assert "the run waits for the run folder to be opened, in hang_in_c" in told.splitlines()[-1]
    assert "topology_watchdog_worker.py" in told
    assert not (tmp_path / "run").exists()


def test_a_loop_that_turns_and_gets_nowhere_names_the_silent_part(tmp_path: Path) -> None:
    code, _ = ended("turning", tmp_path)
    found = read_verdict(tmp_path)
    assert code == 1
    assert found is not None
    assert (found.culprit, found.turning) == ("actor-7, silent for 2 s", True)
    kind, detail = found.event
    assert kind == "watchdog_ended"
    assert json.loads(json.dumps(detail))["culprit"] == found.culprit


@pytest.mark.slow
def test_native_code_that_holds_the_interpreter_is_ended_too(tmp_path: Path) -> None:
    code, _ = ended("native", tmp_path)
    found = read_verdict(tmp_path)
    assert code == 1
    assert found is not None
    assert found.culprit == "native code that holds the interpreter's lock"
    assert found.where.startswith("hang_in_c (topology_watchdog_worker.py")


def test_children_say_where_they_hang_and_are_ended(tmp_path: Path) -> None:
    code, _ = ended("children", tmp_path)
    found = read_verdict(tmp_path)
    assert code == 1
    assert found is not None
    assert found.children == ("actor-7",)
    assert "hang_in_c" in (tmp_path / "actor-7.log").read_text()
    stat, deadline = Path("/proc", (tmp_path / "pid").read_text(), "stat"), time.monotonic() + PATIENCE_S
    while stat.exists() and ") Z" not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline, "the child lives on"


@pytest.mark.slow
def test_a_run_that_gets_on_is_left_alone_also_when_it_was_stopped_for_long(tmp_path: Path) -> None:
    process = start("clean", tmp_path)
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGTSTP)
    time.sleep(11.0)  # longer than the timer in C runs
    os.kill(process.pid, signal.SIGCONT)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, told) == (0, "")
    assert read_verdict(tmp_path) is None
    assert not any(path.is_file() for path in (tmp_path / "logs").rglob("*"))


def test_a_verdict_is_told_once_and_kept(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for number in range(1, 4):
        verdict = Verdict(culprit=f"learner {number}", where="here", children=("a-1.txt",))
        write_verdict(tmp_path, verdict)
        stacks_path(tmp_path).write_text("stacks")
        assert read_verdict(tmp_path) == verdict
        set_aside(tmp_path)
        assert read_verdict(tmp_path) is None
        kept = tmp_path / "logs" / f"watchdog-{number}.json"
        assert json.loads(kept.read_text())["culprit"] == f"learner {number}"
        assert (tmp_path / "logs" / f"watchdog-stacks-{number}.txt").is_file()
    verdict_path(tmp_path).write_text("{}")
    with pytest.raises(RunFolderError, match="move it away"):
        read_verdict(tmp_path)
