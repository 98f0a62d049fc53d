"""A child that does not outlive its parent, whatever it is at: while it still imports, too."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotpot.orphans import ORPHANED
from hotpot.rollout.actors import worker
from hotpot.topology.learning import process

LONG_S = 120.0

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], stdout=sys.stdout)
print(child.pid, flush=True)
time.sleep(50)
"""

LAZY = """
import os, sys, time
class Lazy:
    def find_spec(self, name, *_):
        if name in ("hotpot.topology.learning.child", "hotpot.rollout.actors.child"):
            print("imports", flush=True)
            time.sleep(1000)
sys.meta_path.insert(0, Lazy())
parent = str(os.getppid())
sys.argv[1:] = [one or parent for one in sys.argv[1:]]
"""
"""What a child begins with: its own program is imported for ever."""


@pytest.mark.parametrize(
    ("program", "arguments"),
    [(process._CODE, [""]), (worker._PROGRAM, [json.dumps(sys.path), "0", ""])],
    ids=["learner", "actor"],
)
def test_a_child_whose_parent_is_killed_while_it_imports_ends(program: str, arguments: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, LAZY + program, *arguments], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        assert "imports" in lines
        (child,) = lines - {"imports"}
        os.kill(parent.pid, signal.SIGKILL)
    until_s = time.monotonic() + LONG_S
    while _lives(int(child)):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_what_is_left_off_ends_nothing() -> None:
    program = """
import os, time
from hotpot import orphans
orphans.LOOK_S = 1.0
orphans.end_with(os.getpid()).set()  # never its own parent
time.sleep(2.5)
print("lives", flush=True)
orphans.end_with(os.getpid())
time.sleep(1000)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=LONG_S
    )
    assert (done.stdout, done.returncode) == ("lives\n", ORPHANED)


def _lives(pid: int) -> bool:
    """Return whether a process of that id runs; one that nobody has buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
