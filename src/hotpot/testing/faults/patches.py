"""Places in code that has no named ones: engines, whose floor knows no crash points; the machine's clocks; versions.

Patched while a plan asks for them, and put back afterwards. ``engine_submit``, ``engine_step``, ``engine_publish`` and
``engine_info`` are passed before the call, ``…_answer`` by what it returns; ``environment_version_answer`` by the version
of an environment that is bound.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

from hotpot.envs import registry
from hotpot.experience.crashpoints import Injector
from hotpot.testing.faults.plan import CLOCKS, FaultPlan

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

ENGINE_CALLS = ("submit", "step", "publish", "info")


class Clocks:
    """By how much this process's clocks are off, in seconds."""

    wall_s = 0.0
    monotonic_s = 0.0


def patch(plan: FaultPlan, injector: Injector, clocks: Clocks) -> ExitStack:
    """Patch what ``plan`` needs; close what is returned to put it all back."""
    stack = ExitStack()
    places = {fault.place for fault in plan.faults}
    if any(place.startswith("engine_") for place in places):
        for engine in _engines():
            stack.enter_context(faulty_engine(engine, injector))
    if "environment_version_answer" in places:
        stack.enter_context(_wrapped(registry, "package_version", _versions(injector)))
    if any(fault.kind in CLOCKS for fault in plan.faults):
        stack.enter_context(_clocks(clocks))
    return stack


@contextmanager
def faulty_engine(engine: type[Any], injector: Injector) -> Iterator[None]:
    """Let the calls of every engine of a class pass ``injector``."""
    with ExitStack() as stack:
        for call in ENGINE_CALLS:
            stack.enter_context(_wrapped(engine, call, _passing(engine, call, injector)))
        yield


def _engines() -> list[type[Any]]:
    # Here, so that a process without an engine (an actor's) loads no torch.
    from hotpot.engine.embedded import EmbeddedEngine
    from hotpot.testing.engine import FakeEngine

    return [EmbeddedEngine, FakeEngine]


def _passing(engine: type[Any], call: str, injector: Injector) -> Wrapper:
    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*arguments: Any, **named: Any) -> Any:
            injector(f"engine_{call}", None)
            return injector(f"engine_{call}_answer", inner(*arguments, **named))

        # In a stack it stands as the engine's own: that is who hangs or raises here.
        code = outer.__code__.replace(co_name=call, co_qualname=f"{engine.__qualname__}.{call}")
        module = sys.modules[engine.__module__]
        return FunctionType(code, vars(module), call, None, outer.__closure__)

    return wrap


def _versions(injector: Injector) -> Wrapper:
    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(**named: Any) -> Any:
            version = inner(**named)
            return injector("environment_version_answer", version) if named["kind"] == "env" else version

        return outer

    return wrap


@contextmanager
def _clocks(clocks: Clocks) -> Iterator[None]:
    sources: dict[str, tuple[str, float]] = {
        "time": ("wall_s", 1.0),
        "time_ns": ("wall_s", 1e9),
        "monotonic": ("monotonic_s", 1.0),
        "monotonic_ns": ("monotonic_s", 1e9),
        "perf_counter": ("monotonic_s", 1.0),
        "perf_counter_ns": ("monotonic_s", 1e9),
    }
    with ExitStack() as stack:
        for name, (which, scale) in sources.items():
            stack.enter_context(_wrapped(time, name, _shifted(clocks, which, scale)))
        yield


def _shifted(clocks: Clocks, which: str, scale: float) -> Wrapper:
    def wrap(inner: Callable[[], Any]) -> Callable[[], Any]:
        def outer() -> Any:
            now = inner()
            return now + type(now)(getattr(clocks, which) * scale)

        return outer

    return wrap


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Wrapper) -> Iterator[None]:
    inner = getattr(owner, name)
    setattr(owner, name, wrap(inner))
    try:
        yield
    finally:
        setattr(owner, name, inner)
