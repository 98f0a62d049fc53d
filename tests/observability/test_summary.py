import json
import math
from pathlib import Path
from typing import Any

import pytest

from hotpot.observability.summary import SECONDS, SummaryInputs, split_seconds, summarise, write_summary
from hotpot.testing.records import make_row
from hotpot.types import EvaluationRow, UpdateRow


def evaluation(
    label: str, purpose: str, mean: float, split: str = "holdout", update: int = 0
) -> EvaluationRow:
    return make_row(
        EvaluationRow, update=update, label=label, purpose=purpose, split=split, success_rate=mean, success_low=mean - 0.1,
        success_high=mean + 0.1, num_tasks=512,
    )  # fmt: skip


def inputs(**changed: Any) -> SummaryInputs:
    values: dict[str, Any] = {
        "run_id": "r",
        "status": "finished",
        "hotpot_version": "1",
        "evaluations": [
            evaluation("before", "evaluation", 0.2),
            evaluation("before", "evaluation", 0.9, split="train"),
            evaluation("before", "evaluation_greedy", 0.3),
            evaluation("scheduled", "evaluation", 0.6),
            evaluation("after", "evaluation", 0.7, update=2),
            evaluation("after", "evaluation", 0.8, update=3),
        ],
        "updates": [make_row(UpdateRow, update=n, success_rate=n / 10, optimizer_steps=4) for n in (1, 2, 3)],
        "span_seconds": {
            "generate": 5.0, "learn": 2.0, "publish": 0.5, "other": 0.25, "evaluate": 1.0, "checkpoint": 0.125,
        },
        "num_trajectories": 384,
        "num_evaluation_trajectories": 1024,
        "num_tokens": 10_000,
        "num_sampled_tokens": 4_000,
        "versions": {"env": ("e@1+a",)},
    }  # fmt: skip
    return SummaryInputs(**(values | changed))


def test_holdout_before_and_after_with_intervals() -> None:
    found = summarise(inputs())
    before, after = found["holdout"]["before"], found["holdout"]["after"]
    assert (before["mean"], before["low"], before["high"]) == pytest.approx((0.2, 0.1, 0.3))
    assert before["greedy"]["mean"] == 0.3
    assert (after["mean"], after["greedy"]) == (0.8, None)
    assert (found["trajectories"], found["tokens"], found["updates"], found["optimizer_steps"]) == (
        384,
        10_000,
        3,
        12,
    )
    assert [point["success"] for point in found["curve"]] == [0.1, 0.2, 0.3]
    assert len(found["evaluations"]) == 6


def test_an_evaluation_after_an_earlier_end_is_not_that_of_the_last_update() -> None:
    found = summarise(inputs(evaluations=[evaluation("after", "evaluation", 0.7, update=2)]))
    assert found["holdout"]["after"] is None


def test_seconds_add_up_to_the_whole_and_publishing_is_other() -> None:
    spans = inputs().span_seconds
    seconds = split_seconds(spans)
    assert tuple(seconds) == SECONDS
    assert seconds["other"] == 0.875
    assert math.fsum(seconds.values()) == math.fsum(spans.values())
    assert summarise(inputs())["seconds_total"] == 8.875
    assert split_seconds({}) == dict.fromkeys(SECONDS, 0.0)


def test_a_run_that_ended_early_has_nulls_not_zeros() -> None:
    found = summarise(inputs(evaluations=[], updates=[], span_seconds={}, status="stopped"))
    assert found["holdout"] == {"before": None, "after": None}
    assert found["tokens_per_s"] is None


def test_what_is_not_finite_is_null_in_valid_json(tmp_path: Path) -> None:
    broken = make_row(UpdateRow, update=1, reward_mean=float("nan"), success_rate=0.5)
    write_summary(tmp_path / "summary.json", summarise(inputs(updates=[broken])))
    assert json.loads((tmp_path / "summary.json").read_text())["curve"][0]["reward"] is None
