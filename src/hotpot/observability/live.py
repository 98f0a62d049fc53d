"""The run as it goes: a table with a progress bar on a terminal, one plain line per update elsewhere.

Shows rows it is handed and asks nothing of the run. Its numbers are those of the rows, not of a lake query.
"""

import math
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from hotpot.types import EvaluationRow, UpdateRow

_MARKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Context manager that shows a run: ``with LiveView(...) as view: view.update(row)``.

    Parameters
    ----------
    run_id: shown as the title.
    num_updates: updates the run is planned to make.
    done: how many of them were made before, by a run that is taken up again.
    console: where to draw; a terminal gets the live table, anything else plain lines. ``Console(quiet=True)`` is silent.
    """

    def __init__(
        self, run_id: str, num_updates: int, *, done: int = 0, console: Console | None = None
    ) -> None:
        self._console = console if console is not None else Console()
        self._run_id = run_id
        self._last: UpdateRow | None = None
        self._evaluations: dict[tuple[str, str, str], EvaluationRow] = {}
        self._success: list[float] = []
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("updates", total=num_updates, completed=done)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self.render(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, row: UpdateRow) -> None:
        """Show one finished update."""
        self._last = row
        self._success.append(row.success_rate)
        # Not the update's number: a run that lost updates in a crash has gaps between the numbers.
        self._progress.advance(self._task)
        self._show(update_line(row))

    def evaluation(self, row: EvaluationRow) -> None:
        """Show one finished evaluation."""
        self._evaluations[row.purpose, row.env_version, row.reward_version] = row
        self._show(evaluation_line(row))

    def message(self, text: str) -> None:
        """Show one line above the table."""
        self._console.print(text, highlight=False, markup=False)

    def render(self) -> RenderableType:
        """Return the table as it stands."""
        table = Table(title=f"Hotpot · {self._run_id}", title_justify="left", expand=False)
        for heading in (
            "reward",
            "success",
            "hold-out",
            "greedy",
            "KL",
            "clip",
            "grad",
            "entropy",
            "tokens/s",
        ):
            table.add_column(heading, justify="right")
        row = self._last
        shown = [self._held_out(purpose) for purpose in ("evaluation", "evaluation_greedy")]
        if row is None:
            table.add_row("-", "-", *shown, *["-"] * 5)
            return Group(table, self._progress)
        table.add_row(
            _number(row.reward_mean), f"{row.success_rate:.3f}", *shown, _number(row.approx_kl),
            _number(row.clip_fraction), _number(row.grad_norm), _number(row.entropy), f"{tokens_per_s(row):,.0f}",
        )  # fmt: skip
        parts: list[RenderableType] = [
            table,
            Text(f"success {sparkline(self._success)}"),
            Text(time_line(row)),
        ]
        if row.num_replayed:
            parts.append(
                Text(f"{row.num_replayed} of {row.num_trajectories} trajectories in the loss replayed")
            )
        if row.skipped_steps:
            parts.append(Text(f"{row.skipped_steps} optimiser steps skipped: not finite", style="red"))
        return Group(*parts, self._progress)

    def _held_out(self, purpose: str) -> str:
        """Return the success last measured, over the tasks of all environments."""
        found = [row for (kind, *_), row in self._evaluations.items() if kind == purpose]
        num_tasks = sum(row.num_tasks for row in found)
        solved = sum(row.success_rate * row.num_tasks for row in found)
        return f"{solved / num_tasks:.3f}" if num_tasks else "-"

    def _show(self, line: str) -> None:
        if self._live is not None:
            self._live.update(self.render())
        else:
            # Soft wrapping keeps one update on one line whatever the width of what reads it.
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def update_line(row: UpdateRow) -> str:
    """Return one update as one line of text."""
    skipped = f" skipped={row.skipped_steps}" if row.skipped_steps else ""
    replayed = f" replayed={row.num_replayed}/{row.num_trajectories}" if row.num_replayed else ""
    return (
        f"update {row.update}: reward={_number(row.reward_mean)} success={row.success_rate:.3f} "
        f"loss={_number(row.loss)} kl={_number(row.approx_kl)} clip={_number(row.clip_fraction)} "
        f"grad={_number(row.grad_norm)} entropy={_number(row.entropy)} "
        f"groups={row.num_groups_kept}/{row.num_groups}{replayed} tokens/s={tokens_per_s(row):.0f} {time_line(row)}{skipped}"
    )


def evaluation_line(row: EvaluationRow) -> str:
    """Return one evaluation as one line of text, with its interval."""
    when = "before training" if row.label == "before" else f"after update {row.update}"
    how = "sampled" if row.temperature > 0 else "greedy"
    return (
        f"{row.split} {when}, {how}: "
        f"success={row.success_rate:.3f} [{row.success_low:.3f}, {row.success_high:.3f}] "
        f"reward={_number(row.reward_mean)} tasks={row.num_tasks} seconds={row.seconds:.1f}"
    )


def time_line(row: UpdateRow) -> str:
    """Return where the update's wall time went, in shares."""
    whole_s = (row.finished_us - row.started_us) / 1e6
    if whole_s <= 0:
        return "time -"
    parts = {
        "generate": row.generate_s,
        "environment": row.environment_s,
        "store": row.store_s,
        "learn": row.learn_s,
        "publish": row.publish_s,
    }
    parts["other"] = max(0.0, whole_s - sum(parts.values()))
    return f"time {whole_s:.2f}s " + " ".join(
        f"{name}={length / whole_s:.0%}" for name, length in parts.items()
    )


def tokens_per_s(row: UpdateRow) -> float:
    """Return the tokens of all trajectories collected for the update per second of its wall time; 0 where none passed."""
    whole_s = (row.finished_us - row.started_us) / 1e6
    return row.num_collected_tokens / whole_s if whole_s > 0 else 0.0


def sparkline(shares: list[float], width: int = 60) -> str:
    """Return shares in [0, 1] as a row of blocks, the last ``width`` of them."""
    marks = [min(len(_MARKS) - 1, max(0, int(share * len(_MARKS)))) for share in shares[-width:]]
    return "".join(_MARKS[mark] for mark in marks)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
