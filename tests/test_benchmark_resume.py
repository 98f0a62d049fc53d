"""The benchmark of exact resume: one run that is really killed three times comes to the same bits."""

import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_killed_run_is_compared_and_a_different_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = str(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.setattr(sys, "path", [*sys.path, benchmarks])
    import resume
    from resume_parts import killed

    killed.make_model(tmp_path / "model")
    wanted = resume.reference(tmp_path, "plain", ())
    tally = resume.Tally()
    places = [("kept", 4), ("published", 1), ("checkpoint_renamed", 2)]
    resume.run_scenario(tmp_path, "plain", places, wanted, tally, 0)
    assert tally.hits == Counter(kept=1, published=1, checkpoint_renamed=1)
    assert (tally.resumed, tally.identical, tally.complaints) == (3, 3, [])
    resume.run_scenario(tmp_path, "plain", [("learned", 1)], {**wanted, "weights": "others"}, tally, 1)
    assert (tally.resumed, tally.identical, len(tally.complaints)) == (4, 3, 1)
