"""A side in a process of its own: it is told what to do line by line, and answers with lines of JSON."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent


class Worker:
    """A side that runs ``script`` with ``settings``. What it prints besides answers goes to standard error."""

    def __init__(self, script: str, settings: Mapping[str, Any]) -> None:
        self.last: dict[str, Any] = {}
        self._process = subprocess.Popen(
            [sys.executable, str(PARTS / script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **told: Any) -> dict[str, Any]:
        """Tell the process what to do and return its answer. Raises RuntimeError where it ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(told), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        self.last = json.loads(line)
        return self.last

    def warm(self) -> None:
        """Do a short round."""
        self.ask(do="warm")

    def round(self, number: int) -> float:
        """Do round ``number``; return its seconds. All it said of it is in ``last``."""
        return float(self.ask(do="round", number=number)["seconds"])

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(make: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Be such a process: ``make(settings)`` returns what answers each thing told."""
    answers, sys.stdout = sys.stdout, sys.stderr
    answer = make(json.loads(sys.argv[1]))
    for told in _lines():
        print(json.dumps(answer(told)), file=answers, flush=True)


def _lines() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)
