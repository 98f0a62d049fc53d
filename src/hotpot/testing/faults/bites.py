"""Which faults have bitten: a file that every process of a run appends to, and that a test reads.

A line is written before the fault does its harm, so that a process that dies of it has told. How often a fault may bite in
all processes together is kept beside it, one file for each bite, made by one process only.
"""

import json
import multiprocessing
import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from hotpot.testing.faults.plan import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Bite:
    """One injection that took place: number of the fault in its plan, what and where, who passed, when (Unix time)."""

    fault: int
    kind: str
    place: str
    pid: int
    process: str
    thread: str
    time_s: float
    detail: str = ""


def process_name() -> str:
    """Return what this process is: the name ``multiprocessing`` gave it, or the module of Hotpot whose ``main`` it runs
    (``hotpot.rollout.actors.child``, ``hotpot.topology.learning.child``); else ``MainProcess``."""
    name = multiprocessing.current_process().name
    program = re.search(r"from (hotpot[\w.]+) import main", " ".join(sys.orig_argv))
    return program[1] if program is not None and name == "MainProcess" else name


class BiteLog:
    """The bites of one plan, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def claim(self, number: int, times: int | None) -> bool:
        """Return whether fault ``number`` may bite once more, of ``times`` in all processes; then that one is used up."""
        if times is None:
            return True
        for count in range(times):
            try:
                os.close(os.open(f"{self._path}.{number}.{count}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            return True
        return False

    def write(self, number: int, fault: Fault, detail: str = "") -> None:
        """Note a bite. One write of one line, so that processes don't mix theirs."""
        line = {
            "fault": number,
            "kind": fault.kind.value,
            "place": fault.place,
            "pid": os.getpid(),
            "process": process_name(),
            "thread": threading.current_thread().name,
            "time_s": time.time(),
            "detail": detail,
        }
        file = os.open(self._path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)


def read_bites(path: Path) -> list[Bite]:
    """Return the bites so far, in order; none where there is no file."""
    if not path.exists():
        return []
    return [Bite(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
