"""A run whose loop is measured: what it learned, how long that took, and what processor time of which process it cost.

Called with a file for the figures, a recipe and overrides; trains as ``hotpot train`` does. Reads the clocks of all the run's
processes each time an update is recorded. The measured phase is from the record of the update in which a tenth of the run
is over (the engine is warm, actors and learner are under way) to the record of the last one: evaluations, checkpoints and
the starting of processes are outside of it. Where the system keeps no processor times of other processes, the learner's
are left out: read nothing from such a run.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hotpot.config.load import load_recipe
from hotpot.topology import runs
from hotpot.topology.session import Session
from hotpot.types import Trajectory

WARM_SHARE = 0.1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Clocks when an update was recorded: wall time, and processor time of the main loop's thread, of its process and of that one's children."""

    wall_s: float
    loop_s: float
    main_s: float
    children_s: float
    trajectories: int
    tokens: int
    spans: dict[str, float]


class Measured:
    """Reads the clocks after each update of one run."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self._trajectories = self._tokens = 0

    def install(self) -> None:
        """Have every session read the clocks after it has recorded an update."""
        record, measured = Session.record_update, self

        def recording(session: Session, result: Any, batch: Any, published: Any, **more: Any) -> None:
            record(session, result, batch, published, **more)
            measured.take(session, batch.collected)

        Session.record_update = recording  # type: ignore[method-assign]

    def take(self, session: Session, collected: Sequence[Trajectory]) -> None:
        """Read the clocks; ``collected`` was learned from."""
        self._trajectories += len(collected)
        self._tokens += sum(one.row.num_prompt_tokens + one.row.num_sampled_tokens for one in collected)
        children = [processor_s(pid) for pid in session.dog.children().values()]
        self.readings.append(
            Reading(
                wall_s=time.monotonic(),
                loop_s=time.thread_time(),
                main_s=time.process_time(),
                children_s=sum(children),
                trajectories=self._trajectories,
                tokens=self._tokens,
                spans=dict(session.timeline.totals()),
            )
        )

    def figures(self) -> dict[str, Any]:
        """Return what the measured phase came to."""
        first = self.readings[max(1, round(WARM_SHARE * len(self.readings))) - 1]
        last = self.readings[-1]
        spans = {name: last.spans[name] - first.spans.get(name, 0.0) for name in last.spans}
        return {
            "updates": len(self.readings),
            "wall_s": last.wall_s - first.wall_s,
            "loop_s": last.loop_s - first.loop_s,
            "main_s": last.main_s - first.main_s,
            "children_s": last.children_s - first.children_s,
            "trajectories": last.trajectories - first.trajectories,
            "tokens": last.tokens - first.tokens,
            "spans": {name: round(seconds, 3) for name, seconds in spans.items() if seconds > 0},
        }


def processor_s(pid: int) -> float:
    """Return the processor time of another process, all its threads, user and system; 0 where the system doesn't say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def main() -> None:
    out, recipe, *overrides = sys.argv[1:]
    measured = Measured()
    measured.install()
    runs.train(load_recipe(Path(recipe), overrides), console=Console(quiet=True))
    Path(out).write_text(json.dumps(measured.figures()), encoding="utf-8")


if __name__ == "__main__":
    main()
