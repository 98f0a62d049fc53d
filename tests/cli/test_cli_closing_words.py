"""What `hotpot train` says at the end."""

import json
from pathlib import Path

from hotpot.cli.train import closing_words


def test_before_and_after_and_how_to_look_at_the_run(tmp_path: Path) -> None:
    after = {"mean": 0.95, "low": 0.93, "high": 0.97, "num_tasks": 512}
    before = {"mean": 0.2, "low": 0.17, "high": 0.24, "num_tasks": 512}
    (tmp_path / "summary.json").write_text(json.dumps({"holdout": {"before": before, "after": after}}))
    text = closing_words(tmp_path)
    assert "hold-out success before: 0.200 [0.170, 0.240] on 512 tasks" in text
    assert "hold-out success after: 0.950 [0.930, 0.970] on 512 tasks" in text
    assert f"hotpot show {tmp_path} 0.0.0" in text


def test_a_run_that_measured_nothing(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"holdout": {"before": None, "after": None}}))
    assert "hold-out" not in closing_words(tmp_path)
    assert f"run folder: {tmp_path}" in closing_words(tmp_path)
