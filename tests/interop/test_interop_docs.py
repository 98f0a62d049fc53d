"""The code in docs/other-readers.md runs as it stands.

Blocks marked ``python`` run wherever the lake lies, ``python3`` on a local folder only, ``py`` on S3 only.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from interop_run import Written

PAGE = Path(__file__).parents[2] / "docs" / "other-readers.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame"),  # Dask's own use of pandas
]


def run_blocks(*marks: str) -> dict[str, Any]:
    """Run the page's blocks of these marks, one after the other, in one namespace."""
    names: dict[str, Any] = {}
    for mark, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if mark in marks:
            exec(compile(text, PAGE.name, "exec"), names)
    return names


def test_on_a_local_folder(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written.folder.parents[1])
    names = run_blocks("python", "python3")
    expected = written.expected["steps"]
    assert names["watermark"] == written.watermark
    assert names["by_policy"]["steps"].sum() == expected.num_rows
    assert len(names["logprobs"]) == len(expected["model_logprobs"].combine_chunks().flatten())
    assert sum(names["rewards"]["steps"].to_pylist()) == expected.num_rows
    assert names["success"] == written.expected["trajectories"]["success"].to_numpy().mean()
    assert names["longest"] > 0
    assert names["count"] == [(expected.num_rows,)]
