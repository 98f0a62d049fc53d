"""Named places where a test breaks the process; a no-op unless a test asks for it.

``HOTPOT_CRASH_AT=name`` kills at the first time the place is reached, ``name:3`` at the third; :func:`arm` asks for it from
within. SIGKILL, so that no ``finally`` runs and nothing is flushed: what is left on disk is what the death of the process
would leave. There is one before and after every durable operation; :func:`watch` tells which were passed.

Anything else that can go wrong at a place is decided by an injector: a function that is called with each place that is
passed and may raise, wait, end the process, or give another value back (:func:`through`). :func:`obey` sets it;
``HOTPOT_FAULTS=module:argument`` lets it be made by ``module.install(argument)`` at the first place this process passes, so
that every process of a run, however it was started, obeys the same plan. ``hotpot.testing.faults`` is such a module; this
one knows none.
"""

import importlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")
Injector = Callable[[str, Any], Any]
"""From a place and the value that passes there (None where none does) to the value that goes on."""

_wanted, _, _count = os.environ.get("HOTPOT_CRASH_AT", "").partition(":")
_left = int(_count or 1)
_passed: set[str] | None = None
_injector: Injector | None = None
_making = threading.RLock()


def reach(name: str) -> None:
    """Die, or do whatever else was asked for this place (see the module)."""
    global _left  # noqa: PLW0603 - a counter of the process, for tests only
    if _passed is not None:
        _passed.add(name)
    if _wanted and name == _wanted:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    if _injector is not None:
        _injector(name, None)


def through(name: str, value: Value) -> Value:
    """Return ``value``, which passes the place ``name``, or what was asked to be made of it."""
    if _passed is not None:
        _passed.add(name)
    if _injector is None:
        return value
    found: Value = _injector(name, value)
    return found


def arm(name: str, count: int = 1) -> None:
    """Die at the ``count``-th time from now that ``name`` is reached; an empty name disarms."""
    global _wanted, _left
    _wanted, _left = name, count


def watch() -> set[str]:
    """Begin to note the places that are passed, and return the set they are noted in."""
    global _passed  # noqa: PLW0603 - as above
    if _passed is None:
        _passed = set()
    return _passed


def obey(injector: Injector | None) -> None:
    """Ask ``injector`` at every place from now on; None asks nobody."""
    global _injector  # noqa: PLW0603 - as above
    _injector = injector


def listen() -> None:
    """Obey what the environment variable HOTPOT_FAULTS names now; done once when a process begins."""
    named = os.environ.get("HOTPOT_FAULTS", "")
    obey(_made_of(named) if named else None)


def _made_of(named: str) -> Injector:
    """Return an injector that is made when it is asked first: its module imports much that is not imported yet."""
    module, _, argument = named.partition(":")

    def first(name: str, value: Any) -> Any:
        with _making:
            if _injector is first:
                obey(importlib.import_module(module).install(argument))
            made = _injector
        return value if made is None else made(name, value)

    return first


listen()
