"""The benchmark of generalised advantages runs at a small size and ends with its line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "learner_parts" / "gae.py"


@pytest.mark.slow
def test_it_compares_all_results_and_ends_with_one_line_of_json() -> None:
    environment = os.environ | {"TOKENS": "20000", "TURNS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # at this size the bounds say nothing
    line = json.loads(done.stdout.splitlines()[-1])
    assert set(line) == {"tokens", "seconds", "gae_over_loop", "gae_over_torchrl"}
    assert line["tokens"] == 20000
    assert line["gae_over_loop"] > 0
