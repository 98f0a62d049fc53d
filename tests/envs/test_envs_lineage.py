"""One edit in an installed copy: the versions say exactly what changed, and the behaviour follows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hotpot
from hotpot.envs import demonstrate, load_environment
from hotpot.types import Split
from hotpot.versions import Version, diff, prompt_version

SCRIPT = """
import dataclasses, json
from hotpot.envs import demonstrate, load_environment
from hotpot.types import Split
from hotpot.versions import prompt_version
env = load_environment("order_desk")
prompt = prompt_version(env.system_prompt(), "{{ messages }}", {})
shown = [demonstrate(env, env.task(Split.TRAIN, 0, index), 0) for index in range(20)]
seen = [[[m.content for m in step.result.messages] for step in one.exchanges] for one in shown]
versions = [dataclasses.asdict(v) for v in (env.env_version, env.reward_version, prompt)]
print(json.dumps({"file": __import__("hotpot").__file__, "versions": versions, "seen": seen}))
"""


def run_copy(folder: Path, *, edit: tuple[str, str, str] | None) -> dict[str, Any]:
    """Copy what environments need of Hotpot, edit one file, and return what a fresh process says of it."""
    source = Path(hotpot.__file__).parent
    copy = folder / "hotpot"
    for part in ("__init__.py", "errors.py", "ids.py", "types", "versions", "envs"):
        origin = source / part
        (copy / part).parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            shutil.copytree(origin, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, copy / part)
    if edit is not None:
        file, old, new = edit
        text = (copy / "envs" / file).read_text()
        assert text.count(old) == 1
        (copy / "envs" / file).write_text(text.replace(old, new))
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONHASHSEED": "17"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["file"].startswith(str(folder))
    return answer


def here() -> tuple[list[Version], list[Any]]:
    env = load_environment("order_desk")
    prompt = prompt_version(env.system_prompt(), "{{ messages }}", {})
    shown = [demonstrate(env, env.task(Split.TRAIN, 0, index), 0) for index in range(20)]
    seen = [[[m.content for m in step.result.messages] for step in one.exchanges] for one in shown]
    return [env.env_version, env.reward_version, prompt], seen


def test_an_unchanged_copy_elsewhere_has_the_same_versions_and_behaviour(tmp_path: Path) -> None:
    versions, seen = here()
    copy = run_copy(tmp_path, edit=None)
    assert [Version(**version) for version in copy["versions"]] == versions
    assert copy["seen"] == seen


@pytest.mark.parametrize(
    ("edit", "kind", "name", "lines", "behaves_alike"),
    [
        (
            ("order_desk/system.txt", "answer the total", "reply the total"),
            "prompt",
            "system_prompt",
            ["- answer the total", "+ reply the total"],
            True,
        ),
        (
            ("order_desk/reward/__init__.py", "1.0 if right else 0.0", "2.0 if right else 0.0"),
            "reward",
            "hotpot/envs/order_desk/reward/__init__.py",
            ["- 1.0 if right", "+ 2.0 if right"],
            True,
        ),
        (
            ("order_desk/database.py", 'return f"customer {row[0]}"', 'return f"customer  {row[0]}"'),
            "env",
            "hotpot/envs/order_desk/database.py",
            ['- f"customer {row[0]}"', '+ f"customer  {row[0]}"'],
            False,
        ),
        (
            ("order_desk/items.csv", "chain,roll", "chain,metre"),
            "env",
            "hotpot/envs/order_desk/items.csv",
            ["- chain,roll", "+ chain,metre"],
            False,
        ),
        (
            ("tools.py", "MAX_ECHO_CHARS = 24", "MAX_ECHO_CHARS = 25"),
            "env",
            "hotpot/envs/tools.py",
            ["- MAX_ECHO_CHARS = 24", "+ MAX_ECHO_CHARS = 25"],
            True,
        ),
    ],
    ids=["system prompt", "reward function", "tool", "data file", "tool framework"],
)
def test_one_edit_changes_one_version(
    tmp_path: Path, edit: tuple[str, str, str], kind: str, name: str, lines: list[str], behaves_alike: bool
) -> None:
    versions, seen = here()
    copy = run_copy(tmp_path, edit=edit)
    edited = [Version(**version) for version in copy["versions"]]
    changes = {old.kind: diff(old, new) for old, new in zip(versions, edited, strict=True)}
    assert [changed for changed, found in changes.items() if found] == [kind]
    (change,) = changes[kind]
    assert (change.what, change.name) == ("file", name)
    moved = [line for line in change.lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert len(moved) == 2
    for line, expected in zip(moved, lines, strict=True):
        assert line[0] == expected[0]
        assert expected[2:] in line
    assert (copy["seen"] == seen) == behaves_alike
