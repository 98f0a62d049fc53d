"""A process under a watchdog that hangs in the way its first argument says, in the run folder of its second.

The packages around the watchdog import torch, which takes seconds; it needs none of it, so that they are left out.
"""

import ctypes
import faulthandler
import importlib.util
import os
import signal
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

from hotpot.timeline import Timeline  # noqa: E402
from hotpot.topology.supervision.watchdog import bounded, watch  # noqa: E402

case, folder = sys.argv[1], Path(sys.argv[2])
HANG_S = 100.0


def hang_in_c(*, holds_the_lock: bool) -> None:
    library = ctypes.PyDLL(None) if holds_the_lock else ctypes.CDLL(None)
    library.sleep(int(HANG_S))


def child() -> None:
    faulthandler.register(signal.SIGUSR1)
    os.write(1, b"ready\n")
    while True:  # a signal ends the sleep
        hang_in_c(holds_the_lock=True)


def main() -> None:
    if case == "child":
        child()
    if case == "opening":
        with bounded("the end of a nap", limit_s=60.0):
            pass
        with bounded("the run folder to be opened", limit_s=1.0):
            hang_in_c(holds_the_lock=False)
    timeline = Timeline()
    with watch(folder, stop_after_s=2.0, timeline=timeline, silent=lambda: "actor-7, silent for 2 s") as dog:
        if case == "turning":
            while True:
                with timeline.span("generate"):
                    dog.turn(7)
                time.sleep(0.01)
        if case == "children":
            with (folder / "actor-7.log").open("wb") as log:
                command = [sys.executable, __file__, "child", str(folder)]
                other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
            assert other.stdout is not None
            other.stdout.readline()
            dog.children = lambda: {"actor-7": other.pid}
            (folder / "pid").write_text(str(other.pid))
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
