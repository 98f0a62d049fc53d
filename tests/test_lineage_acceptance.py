"""`hotpot lineage NEW --against OLD` names exactly what was edited between two real runs, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hotpot
from hotpot.experience import open_run

PACKAGE = Path(hotpot.__file__).parent
RECIPE = PACKAGE.parents[1] / "recipes" / "order_desk.toml"
SMALL = (
    "run.threads=1", "warmstart.steps=3", "warmstart.batch_size=4", "warmstart.hidden_size=16", "warmstart.num_heads=2",
    "warmstart.num_kv_heads=2", "warmstart.intermediate_size=16", "rollout.tasks_per_batch=2", "rollout.samples_per_task=2",
    "rollout.max_steps=2", "rollout.max_step_tokens=4", "learner.minibatches=2", "topology.updates=1",
    "evaluation.num_tasks_final=2", "evaluation.greedy=false",
)  # fmt: skip
KINDS = ("env", "reward", "prompt", "schema")
DESK = "hotpot/envs/order_desk"
SYSTEM = "price each order at the prices agreed with the customer. answer the total."
OTHER_SYSTEM = "price each order at the prices agreed with that customer. answer the total."

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Desk:
    """A folder with a copy of the package, a model and runs; everything happens in processes that import the copy."""

    folder: Path

    def hotpot(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hotpot.cli", *arguments], capture_output=True, text=True, check=False, cwd=self.folder,
            timeout=200, env={
                **os.environ, "PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def train(self, run_id: str, *overrides: str) -> None:
        self.hotpot("train", str(RECIPE), *SMALL, "model.path=model", f"run.id={run_id}", *overrides)

    def versions(self, run_id: str) -> dict[str, str]:
        columns = ", ".join(f"{kind}_version" for kind in KINDS)
        (row,) = (
            open_run(self.folder / "runs" / run_id).sql(f"select distinct {columns} from steps").to_pylist()
        )
        return {kind: str(row[f"{kind}_version"]) for kind in KINDS}

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.folder / "src" / path
        text = file.read_text()
        assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times"
        file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """The unchanged copy with a model and the run ``old``."""
    desk = Desk(tmp_path_factory.mktemp("desk"))
    shutil.copytree(PACKAGE, desk.folder / "src" / "hotpot", ignore=shutil.ignore_patterns("__pycache__"))
    desk.hotpot("model", "warmstart", str(RECIPE), *SMALL, "--out", "model")
    desk.train("old")
    return desk


@pytest.fixture
def desk(before: Desk, tmp_path: Path) -> Desk:
    """A copy of that, to be changed."""
    shutil.copytree(before.folder, tmp_path, dirs_exist_ok=True)
    return Desk(tmp_path)


def line_of(desk: Desk, path: str, text: str) -> tuple[int, str]:
    """Return the number and the whole of the line in ``path`` that holds ``text``."""
    lines = (desk.folder / "src" / path).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return number, lines[number - 1]


def difference(part: str, where: str, old: str, new: str, scope: str = "") -> dict[str, Any]:
    return {"part": part, "where": where, "old": old, "new": new, "scope": scope}


def check(desk: Desk, expected: list[dict[str, Any]], changed: str | None) -> None:
    """Assert what lineage says as JSON and as text, and that only the version ``changed`` is another one."""
    assert json.loads(desk.hotpot("lineage", "new", "--against", "old", "--json")) == expected
    lines = []
    for found in expected:
        scope = f" (in {found['scope']})" if found["scope"] else ""
        lines.append(f"{found['part']}: {found['where']}{scope}")
        lines += [f"  {sign} {found[side]}" for sign, side in (("-", "old"), ("+", "new")) if found[side]]
    text = desk.hotpot("lineage", "new", "--against", "old").splitlines()
    assert text == (lines or ["new and old differ in nothing that is recorded"])
    old, new = desk.versions("old"), desk.versions("new")
    assert {kind for kind in KINDS if old[kind] != new[kind]} == ({changed} if changed else set())


@pytest.mark.parametrize(
    ("path", "old", "new", "kind", "scope"),
    [
        (f"{DESK}/reward/__init__.py", "1.0 if right", "2.0 if right", "reward", "judge"),
        (
            f"{DESK}/database.py",
            "price {row[0]} per",
            "price {row[0]} each",
            "env",
            "Desk.customer_price",
        ),
        (f"{DESK}/items.csv", "belt,piece", "belt,crate", "env", ""),
    ],
)
def test_a_line_of_the_reward_of_a_tool_or_of_its_data(
    desk: Desk, path: str, old: str, new: str, kind: str, scope: str
) -> None:
    number, before = line_of(desk, path, old)
    desk.edit(path, old, new)
    desk.train("new")
    check(desk, [difference(kind, f"{path} line {number}", before, before.replace(old, new), scope)], kind)


def test_a_word_of_the_system_prompt_in_its_file(desk: Desk) -> None:
    desk.edit(f"{DESK}/system.txt", SYSTEM, OTHER_SYSTEM)
    desk.train("new")
    check(desk, [difference("prompt", "system_prompt line 1", SYSTEM, OTHER_SYSTEM)], "prompt")


def test_a_word_of_the_system_prompt_in_the_recipe(desk: Desk) -> None:
    desk.train("new", f"prompt.system={OTHER_SYSTEM}")
    check(
        desk,
        [
            difference("prompt", "system_prompt line 1", SYSTEM, OTHER_SYSTEM),
            difference("recipe", "prompt.system", "null", OTHER_SYSTEM),
        ],
        "prompt",
    )


def test_a_parameter_of_the_environment(desk: Desk) -> None:
    desk.train("new", "env.params.num_items=5")
    check(
        desk,
        [
            difference("env", "param num_items", "6", "5"),
            difference("recipe", "env.params.num_items", "", "5"),
        ],
        "env",
    )


def test_nothing(desk: Desk) -> None:
    desk.train("new")
    check(desk, [], None)
