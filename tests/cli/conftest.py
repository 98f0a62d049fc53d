"""Two small runs: ``old`` is finished and has a summary, ``new`` changed a tool and a setting."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import TOOL, write_run
from typer.testing import CliRunner, Result

from hotpot.cli.main import app


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    old = write_run(folder, "old")
    summary = {
        "run_id": "old", "status": "finished", "updates": 1, "trajectories": 8, "seconds_total": 3.5,
        "holdout": {"before": {"mean": 0.25}, "after": {"mean": 0.75}},
    }  # fmt: skip
    (old / "summary.json").write_text(json.dumps(summary))
    write_run(folder, "new", tool=TOOL.replace("line 41\n", "line forty-one\n"), learning_rate=2e-4)
    return folder


@pytest.fixture
def hotpot() -> Callable[..., Result]:
    """Run the program in this process; exceptions that are no exit codes pass through."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)

    return run


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text('name = "small"\n[topology]\nupdates = 3\n')
    return path
