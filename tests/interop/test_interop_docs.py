"""The code in docs/other-readers.md runs as it stands.

Blocks marked ``python`` run wherever the lake lies, ``python3`` on a local folder only, ``py`` on S3 only.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from interop_run import Written

from hotpot.config import S3Section, StoreSection
from hotpot.experience import ExperienceStore, RunReader
from hotpot.experience.maintenance import compact
from hotpot.testing.object_server import object_server
from hotpot.testing.records import make_group, make_leases

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


def test_on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, size, steps = 3, 4, 2
    with object_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        settings = StoreSection(
            lake="s3://experience/lake",
            s3=S3Section(endpoint=server.endpoint, allow_http=True),
            archive_every_batches=1,
            archive_every_s=600.0,
        )
        folder = tmp_path / "runs" / "first"
        with ExperienceStore.open(folder, run_id="first", settings=settings, vocabulary_size=64) as store:
            for issue in range(rounds):
                group = make_group(run_id="first", issue=issue, size=size, num_steps=steps)
                store.ledger.lease(make_leases(group))
                store.append(group)
                store.flush()
        reports = {report.table: report for report in compact(RunReader.open(folder))}
        assert (reports["steps"].files_before, reports["steps"].files_after) == (rounds, 1)
        names = run_blocks("python", "py")
    assert names["by_policy"]["steps"].to_list() == [rounds * size * steps]
    assert names["rewards"]["steps"].to_pylist() == [rounds * size * steps]
    assert len(names["logprobs"]) == names["by_policy"]["sampled_tokens"].sum()
