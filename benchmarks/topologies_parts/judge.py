"""What the runs of the benchmark of topologies come to: rates, idle processors, and whether the policies are as good.

Pure but for reading run folders. Pairs are hold-out tasks: each topology is measured on the same ones, with the same random
numbers, after the same number of trajectories.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotpot.experience import open_run
from hotpot.observability.queries import cut

NORMAL_95 = 1.96

OUTCOMES = """
select t.episode_id as task, t.success as solved from trajectories t
join (select max(policy_version) as version from evaluations where label = 'after') e on t.policy_version = e.version
where t.purpose = 'evaluation' order by task"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run came to: trajectories learned and the tokens they hold, wall time and processor time of its measured phase,
    and by hold-out task whether it is solved at the end."""

    trajectories: int
    tokens: int
    wall_s: float
    processor_s: float
    solved: Mapping[str, bool]

    @property
    def rate(self) -> float:
        """Trajectories learned per second."""
        return self.trajectories / self.wall_s

    def idle_share(self, cores: int) -> float:
        """Share of the cores' time in which no process of the run computed."""
        return 1 - self.processor_s / (cores * self.wall_s)


def read_run(folder: Path, figures: Mapping[str, Any]) -> Run:
    """Return what a finished run came to; ``figures`` are those that it was measured with."""
    rows = open_run(folder).sql(OUTCOMES).to_pylist()
    return Run(
        trajectories=figures["trajectories"],
        tokens=figures["tokens"],
        wall_s=figures["wall_s"],
        processor_s=figures["main_s"] + figures["children_s"],
        solved={row["task"]: bool(row["solved"]) for row in rows},
    )


def ideal_s(parts: Mapping[str, float], cores: int, tokens: int) -> float:
    """Return how long ``cores`` take for ``tokens`` where they share generating and learning without a rest."""
    return tokens * (parts["generate_s"] + parts["learn_s"]) / cores


def difference_low(ours: Sequence[Run], base: Sequence[Run]) -> tuple[float, float]:
    """Return mean and lower end of the paired 95 % interval of the success of ``ours`` minus that of ``base``, run by run.

    Raises SystemExit where the two were measured on other tasks.
    """
    apart: list[float] = []
    for one, other in zip(ours, base, strict=True):
        if one.solved.keys() != other.solved.keys():
            raise SystemExit("two topologies were measured on different hold-out tasks")
        apart += [float(one.solved[task]) - float(other.solved[task]) for task in one.solved]
    mean = statistics.mean(apart)
    return mean, mean - NORMAL_95 * statistics.stdev(apart) / math.sqrt(len(apart))


def tables(folder: Path) -> list[str]:
    """Return lines that say how stale what a run learned was, whether long episodes lack in it, and what it discarded."""
    run = open_run(folder)
    tokens = cut(run, "queue/collected_tokens", by=("staleness",)).to_pylist()
    total = sum(row["value"] for row in tokens)
    by_staleness = sorted((row["staleness"], row["value"] / total) for row in tokens)
    lines = [
        "staleness (updates: share of tokens): " + " ".join(f"{at}:{share:.3f}" for at, share in by_staleness)
    ]
    for metric in ("queue/length_bias_steps", "queue/length_bias_tokens"):
        rows = cut(run, metric, by=("update",)).to_pylist()
        biases = [row["value"] for row in sorted(rows, key=lambda row: row["update"])]
        tenth = max(1, len(biases) // 10)
        lines.append(
            f"{metric}: first tenth of the updates {statistics.mean(biases[:tenth]):.3f}, "
            f"the others {statistics.mean(biases[tenth:] or biases):.3f}"
        )
    gone = cut(run, "queue/discards", by=("reason",)).to_pylist()
    lines.append("discarded: " + (", ".join(f"{row['value']} {row['reason']}" for row in gone) or "nothing"))
    return lines
