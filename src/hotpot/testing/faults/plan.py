"""What goes wrong, where and when: a plan as data, so that every process of a run can be given the same one.

Owns the words only; what a fault does is in ``harm``, where the places lie in the code is ``crashpoints.reach``'s and
``through``'s callers, and ``patches``. Pure.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

MODULE = "hotpot.testing.faults"
VARIABLE = "HOTPOT_FAULTS"
"""Environment variable that names the injector of a process, see :mod:`hotpot.experience.crashpoints`."""

ANSWER = "_answer"
"""Ending of the places that a value passes, so that garbage can take its stead."""


class Kind(StrEnum):
    """What happens at a place."""

    HANG = "hang"
    """Nothing, for ``seconds``: whoever passes stays there."""
    FREEZE = "freeze"
    """The whole process stops (SIGSTOP), until somebody continues or kills it."""
    SLOW = "slow"
    """``seconds`` pass, then it goes on."""
    CRASH = "crash"
    """An exception that no code expects."""
    FAIL = "fail"
    """The exception that infrastructure raises there: a full disk, an engine that refuses, an environment that broke."""
    EXIT = "exit"
    """The process ends at once with :data:`EXIT_CODE`, no ``finally`` runs."""
    KILL = "kill"
    """The process is killed (SIGKILL)."""
    DEATH = "death"
    """The part dies: this call and every later one of the same part raise as FAIL does."""
    GARBAGE = "garbage"
    """What passes is replaced by something that breaks the contract; only at places that end in ``_answer``."""
    WALL_JUMP = "wall_jump"
    """The time of day of this process is ``seconds`` further from here on (negative: earlier)."""
    MONOTONIC_JUMP = "monotonic_jump"
    """The monotonic clock of this process is ``seconds`` further from here on."""
    UPGRADE = "upgrade"
    """The environment is of another version in this process: at ``environment_version_answer``."""


EXIT_CODE = 70
"""Exit code of a process that was ended by :attr:`Kind.EXIT`."""

CLOCKS = (Kind.WALL_JUMP, Kind.MONOTONIC_JUMP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong at one place.

    It bites first when a process passes ``place`` for the ``at``-th time, counted in each process by itself, and then at
    each further pass: ``times`` in all processes together, or as long as the run lives where that is None. ``process`` is
    a part of the names of the processes that it may bite in (:func:`hotpot.testing.faults.bites.process_name`). ``seconds`` belong to HANG, SLOW and
    the jumps of clocks.
    """

    kind: Kind
    place: str
    at: int = 1
    times: int | None = 1
    seconds: float = 3600.0
    process: str = ""

    def __post_init__(self) -> None:
        if self.at < 1 or (self.times is not None and self.times < 1):
            raise ValueError(f"at = {self.at} and times = {self.times} count from 1; raise them")
        given = self.place.endswith(ANSWER)
        if self.kind in (Kind.GARBAGE, Kind.UPGRADE) and not given:
            raise ValueError(
                f"no value passes {self.place!r}, so it can't be replaced ({self.kind}); name a place that ends in {ANSWER}"
            )

    @property
    def part(self) -> str:
        """The part that the place belongs to: the first word of its name."""
        return self.place.partition("_")[0]

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}:{self.at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Faults, and the file that says which of them have bitten. ``seed`` chooses among kinds of garbage."""

    faults: tuple[Fault, ...]
    log: Path
    seed: int = 0

    def write(self, path: Path) -> dict[str, str]:
        """Write the plan to ``path``; return the environment variable that makes a process obey it."""
        text = {"log": str(self.log), "seed": self.seed, "faults": [asdict(fault) for fault in self.faults]}
        path.write_text(json.dumps(text, indent=1), encoding="utf-8")
        return {VARIABLE: f"{MODULE}:{path}"}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the plan that :meth:`write` wrote. Raises ValueError, TypeError or OSError where there is none."""
        text = json.loads(path.read_text(encoding="utf-8"))
        faults = tuple(Fault(**{**one, "kind": Kind(one["kind"])}) for one in text["faults"])
        return cls(faults=faults, log=Path(text["log"]), seed=text["seed"])
