"""One fault injector for every campaign: what goes wrong, where, when, in whichever process of a run passes there.

``plan``      faults as data; a plan in a file, named by an environment variable
``injector``  who is asked at every place
``harm``      what a fault raises, what garbage is
``patches``   places in code that has none of its own
``bites``     which faults have bitten

Nothing of this is loaded, and a named place costs one comparison, until somebody asks for it: :func:`injected` in this
process, or the variable that :meth:`FaultPlan.write` returns in the environment of others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotpot.experience.crashpoints import obey
from hotpot.testing.faults.bites import Bite, read_bites
from hotpot.testing.faults.harm import InjectedCrash
from hotpot.testing.faults.injector import FaultInjector
from hotpot.testing.faults.patches import faulty_engine
from hotpot.testing.faults.plan import EXIT_CODE, VARIABLE, Fault, FaultPlan, Kind

__all__ = [
    "EXIT_CODE",
    "VARIABLE",
    "Bite",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "InjectedCrash",
    "Kind",
    "faulty_engine",
    "injected",
    "install",
    "read_bites",
]


def install(argument: str) -> FaultInjector:
    """Return the injector of the plan in file ``argument``, patches made; for the rest of this process's life."""
    made = FaultInjector(FaultPlan.read(Path(argument)))
    made.patch()
    return made


@contextmanager
def injected(plan: FaultPlan) -> Iterator[FaultInjector]:
    """Obey ``plan`` in this process while the block runs."""
    made = FaultInjector(plan)
    made.patch()
    obey(made)
    try:
        yield made
    finally:
        obey(None)
        made.restore()
