"""A process under a watchdog that hangs in the way its first argument says, in the run folder of its second.

The packages around the watchdog import torch, which takes seconds; it needs none of it, so that they are left out.
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

_TOPOLOGY = Path(next(iter(importlib.util.find_spec("hotpot").submodule_search_locations))) / "topology"  # type: ignore[union-attr,arg-type]
_package = types.ModuleType("hotpot.topology")
_package.__path__ = [str(_TOPOLOGY)]
sys.modules["hotpot.topology"] = _package

from hotpot import stacks  # noqa: E402
from hotpot.timeline import Timeline  # noqa: E402
from hotpot.topology.supervision.verdict import children_folder  # noqa: E402
from hotpot.topology.supervision.watchdog import watch  # noqa: E402

case, folder = sys.argv[1], Path(sys.argv[2])
HANG_S = 100.0


def hang_in_c(*, holds_the_lock: bool) -> None:
    library = ctypes.PyDLL(None) if holds_the_lock else ctypes.CDLL(None)
    library.sleep(int(HANG_S))


def child() -> None:
    stacks.register(children_folder(folder), "actor-7")
    os.write(1, b"ready\n")
    hang_in_c(holds_the_lock=True)


def main() -> None:
    if case == "child":
        child()
    timeline = Timeline()
    with watch(folder, stop_after_s=2.0, timeline=timeline, silent=lambda: "actor-7, silent for 2 s") as dog:
        if case == "turning":
            while True:
                with timeline.span("generate"):
                    dog.turn(7)
                time.sleep(0.01)
        if case == "children":
            other = subprocess.Popen([sys.executable, __file__, "child", str(folder)], stdout=subprocess.PIPE)
            assert other.stdout is not None
            other.stdout.readline()
        if case == "clean":
            # Three ways of getting on, each for longer than the silence allowed.
            for step in range(180):
                if step < 60:
                    dog.turn(step)
                elif step < 120:
                    dog.turn()
                else:
                    with timeline.span("evaluate"):
                        pass
                time.sleep(0.05)
            return
        lock = threading.Lock()
        lock.acquire()
        with timeline.span("learn"), timeline.span("store"):
            if case == "lock":
                lock.acquire()
            hang_in_c(holds_the_lock=case == "native")


main()
