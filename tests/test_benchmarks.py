"""The benchmarks start the program that users start."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

BENCHMARKS = [
    path
    for path in sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))
    if "HOTPOT = " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_the_command_of_a_benchmark_answers(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer = subprocess.run([*module.HOTPOT, "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("hotpot ")
