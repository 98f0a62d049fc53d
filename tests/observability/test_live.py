import io

from rich.console import Console

from hotpot.observability.live import LiveView, sparkline, time_line, update_line
from hotpot.testing.records import make_row
from hotpot.types import EvaluationRow, UpdateRow


def update(number: int, **values: float) -> UpdateRow:
    return make_row(
        UpdateRow, update=number, reward_mean=0.25, success_rate=0.5, approx_kl=0.002, num_tokens=0,
        num_collected_tokens=1_000,
        started_us=0, finished_us=2_000_000, generate_s=1.0, learn_s=0.5, **values,
    )  # fmt: skip


EVALUATION = make_row(
    EvaluationRow, label="before", purpose="evaluation", split="holdout", success_rate=0.125, success_low=0.1,
    success_high=0.15, num_tasks=512,
)  # fmt: skip


def test_plain_output_is_one_line_per_row() -> None:
    file = io.StringIO()
    with LiveView("r", 3, console=Console(file=file, width=40)) as view:
        view.evaluation(EVALUATION)
        view.update(update(1))
        view.update(update(2, skipped_steps=1, num_replayed=3, num_trajectories=8))
        view.message("[note] as it stands")
    lines = file.getvalue().splitlines()
    assert len(lines) == 4
    assert "success=0.125 [0.100, 0.150]" in lines[0]
    assert lines[1].startswith("update 1: reward=0.25 success=0.500")
    assert "tokens/s=500" in lines[1]
    assert "generate=50% environment=0% store=0% learn=25% publish=0% other=25%" in lines[1]
    assert "skipped=1" in lines[2]
    assert "replayed=3/8" in lines[2]
    assert "replayed" not in lines[1]
    assert lines[3] == "[note] as it stands"


def test_a_terminal_gets_a_table_that_ends_with_the_last_values() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with LiveView("r-7", 3, console=console) as view:
        view.evaluation(EVALUATION)
        view.update(update(1))
        view.update(update(2, skipped_steps=2))
    text = file.getvalue()
    for shown in ("Hotpot · r-7", "0.125", "0.002", "2/3", "2 optimiser steps skipped"):
        assert shown in text


def test_nothing_is_drawn_on_a_quiet_console() -> None:
    file = io.StringIO()
    with LiveView("r", 1, console=Console(file=file, quiet=True)) as view:
        view.update(update(1))
    assert file.getvalue() == ""


def test_odd_values_are_shown_not_hidden() -> None:
    assert "loss=nan" in update_line(update(1, loss=float("nan")))
    assert time_line(make_row(UpdateRow)) == "time -"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([0.1] * 100)) == 60
