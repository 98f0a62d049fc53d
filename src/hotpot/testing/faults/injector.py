"""The injector: counts the passes of each place and does what the plan says is due there.

Owns the counts of its process. Safe to call from any thread; a fault that hangs one thread holds no lock of the others'.
"""

import os
import signal
import threading
from contextlib import ExitStack
from random import Random
from typing import Any

from hotpot.testing.faults.bites import BiteLog, process_name
from hotpot.testing.faults.harm import InjectedCrash, failure, garbage, upgraded
from hotpot.testing.faults.patches import Clocks, patch
from hotpot.testing.faults.plan import EXIT_CODE, Fault, FaultPlan, Kind


class FaultInjector:
    """Obeys one plan in this process; see :class:`hotpot.testing.faults.FaultPlan`."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._log = BiteLog(plan.log)
        self._guard = threading.Lock()
        self._passes = [0] * len(plan.faults)
        self._dead: dict[str, Fault] = {}
        self._rng = Random(plan.seed)
        self._clocks = Clocks()
        self._patches = ExitStack()
        self._places: dict[str, list[int]] = {}
        for number, fault in enumerate(plan.faults):
            self._places.setdefault(fault.place, []).append(number)

    def patch(self) -> None:
        """Make the places that lie in code without named ones, until :meth:`restore`."""
        self._patches.enter_context(patch(self._plan, self, self._clocks))

    def restore(self) -> None:
        """Undo :meth:`patch`."""
        self._patches.close()

    def __call__(self, place: str, value: Any) -> Any:
        """Hear that ``value`` passes ``place``; return what goes on, raise, wait, or end the process."""
        if self._dead and (fault := self._dead.get(place.partition("_")[0])) is not None:
            raise failure(fault)
        for number in self._places.get(place, ()):
            value = self._pass(number, self._plan.faults[number], value)
        return value

    def _pass(self, number: int, fault: Fault, value: Any) -> Any:
        with self._guard:
            self._passes[number] += 1
            if self._passes[number] < fault.at or not _here(fault):
                return value
            spoilt = garbage(fault.place, value, self._rng) if fault.kind is Kind.GARBAGE else (value, "")
            if spoilt is None or not self._log.claim(number, fault.times):
                return value
            self._log.write(number, fault, spoilt[1])
            if fault.kind is Kind.DEATH:
                self._dead[fault.part] = fault
        self._bite(fault)
        return upgraded(value) if fault.kind is Kind.UPGRADE else spoilt[0]

    def _bite(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.HANG | Kind.SLOW:
                threading.Event().wait(fault.seconds)
            case Kind.FREEZE:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Kind.CRASH:
                raise InjectedCrash(f"injected: {fault}")
            case Kind.FAIL | Kind.DEATH:
                raise failure(fault)
            case Kind.EXIT:
                os._exit(EXIT_CODE)
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.WALL_JUMP:
                self._clocks.wall_s += fault.seconds
            case Kind.MONOTONIC_JUMP:
                self._clocks.monotonic_s += fault.seconds
            case _:
                pass


def _here(fault: Fault) -> bool:
    return fault.process in process_name()
