import json
from pathlib import Path

import pytest

from hotpot.observability.files import replace_text
from hotpot.observability.trace import write_trace
from hotpot.timeline import Slice, Timeline


def test_a_timeline_becomes_complete_events_in_microseconds(tmp_path: Path) -> None:
    timeline = Timeline(keep_slices=True)
    with timeline.span("learn"), timeline.span("store"):
        pass
    more = [Slice(name="archive", start_s=0.5, length_s=0.25, depth=0)]
    write_trace(tmp_path / "trace.json", {"main": timeline.slices, "writer": more}, details={"run_id": "r"})
    document = json.loads((tmp_path / "trace.json").read_text())
    events = document["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    complete = [event for event in events if event["ph"] == "X"]
    assert document["otherData"] == {"run_id": "r"}
    assert [(names[event["tid"]], event["name"]) for event in complete] == [
        ("main", "store"), ("main", "learn"), ("writer", "archive"),
    ]  # fmt: skip
    assert complete[2] | {"ts": 500_000.0, "dur": 250_000.0} == complete[2]
    inner, outer = complete[0], complete[1]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01


def test_no_slices_is_still_a_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", {"main": []})
    assert [event["ph"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]] == [
        "M"
    ] * 3


def test_a_write_that_breaks_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    replace_text(path, ["old"])

    def broken():
        yield "half"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        replace_text(path, broken())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
