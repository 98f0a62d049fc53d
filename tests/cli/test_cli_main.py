import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotpot import __version__

HEAVY = ("torch", "transformers", "deltalake", "duckdb", "pyarrow", "numpy", "pydantic", "rich.table")


def program(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hotpot.cli", *arguments], capture_output=True, text=True, check=False, cwd=cwd, timeout=120
    )  # fmt: skip


def test_help_names_every_command_that_works_and_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.perf_counter()
    done = program("--help")
    with capsys.disabled():
        sys.stdout.write(f"\nhotpot --help: {time.perf_counter() - begin:.2f} s\n")
    assert done.returncode == 0
    listed = {line.split()[0] for line in done.stdout.split("Commands:")[1].splitlines() if line.strip()}
    assert listed == {"train", "replay", "eval", "runs", "show", "sql", "lineage", "lake", "model", "env"}


def test_nothing_heavy_is_imported_before_a_command_runs() -> None:
    code = f"import sys, hotpot.cli.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_version(hotpot) -> None:
    assert hotpot("--version").stdout == f"hotpot {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "missing.toml"), "recipe file missing.toml does not exist"),
        (("train",), "no recipe is given"),
        (("train", "small.toml", "learner.learnin_rate=1"), "nearest: learner.learning_rate"),
        (("train", "small.toml", "learner.minibatches=0"), "learner.minibatches = 0 must be > 0"),
        (("show", "nowhere", "0.0.0"), "no run 'nowhere'"),
        (("sql", "--metric", "rollout/rewrd_mean", "nowhere"), "nearest: rollout/reward_mean"),
        (("model", "info", "nowhere"), "no model folder at nowhere"),
        (("env", "check", "order_dsk"), "order_desk"),
        (("frobnicate",), "No such command"),
    ],
)
def test_wrong_use_is_one_message_and_code_2(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "small.toml").write_text("")
    done = program(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.toml"]


def test_an_unexpected_error_keeps_its_traceback_and_exits_with_1(tmp_path: Path) -> None:
    code = (
        "import hotpot.cli.main as m, hotpot.cli.runs as r\n"
        "def broken(folder): raise ZeroDivisionError('inside')\n"
        "r.list_runs = broken\n"
        "import sys; sys.argv = ['hotpot', 'runs']; m.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: inside" in done.stderr


def test_plan_as_table_and_json(hotpot, recipe_file: Path) -> None:
    table = hotpot("train", recipe_file, "rollout.samples_per_task=4", "--plan")
    assert table.exit_code == 0
    assert "16 x 4" in table.stdout
    found = json.loads(hotpot("train", recipe_file, "rollout.samples_per_task=4", "--plan", "--json").stdout)
    assert (found["plan"]["episodes_per_update"], found["plan"]["total_optimizer_steps"]) == (64, 12)
    assert found["recipe"]["name"] == "small"
