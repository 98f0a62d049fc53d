"""The trace file: a timeline's slices in the Trace Event Format, which Perfetto and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016), complete events (``ph`` X) with ``ts`` and ``dur`` in microseconds, and
metadata events (``ph`` M) that name the process and its threads.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotpot.observability.files import replace_text
from hotpot.timeline import Slice


def write_trace(
    path: Path,
    threads: Mapping[str, Sequence[Slice]],
    *,
    process: str = "hotpot",
    details: Mapping[str, Any] | None = None,
) -> None:
    """Write the slices of each named thread to ``path``, whole or not at all.

    All slices count from one moment: give timelines that began together. ``details`` go under ``otherData`` (run id,
    dropped slices). One event a line, so that half a million slices need no second copy in memory. Raises OSError.
    """
    replace_text(path, _lines(threads, process, dict(details or {})))


def _lines(threads: Mapping[str, Sequence[Slice]], process: str, details: Mapping[str, Any]) -> Iterator[str]:
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(details)},"traceEvents":[\n'
    separator = ""
    for event in _events(threads, process):
        yield separator + event
        separator = ",\n"
    yield "\n]}\n"


def _events(threads: Mapping[str, Sequence[Slice]], process: str) -> Iterator[str]:
    yield _naming("process_name", 0, {"name": process})
    quoted: dict[str, str] = {}
    for number, (name, slices) in enumerate(threads.items(), start=1):
        yield _naming("thread_name", number, {"name": name})
        yield _naming("thread_sort_index", number, {"sort_index": number})
        for piece in slices:
            text = quoted.setdefault(piece.name, json.dumps(piece.name))
            # Written by hand: json.dumps for each of half a million slices takes more than twice as long.
            yield (
                f'{{"ph":"X","name":{text},"cat":"hotpot","pid":1,"tid":{number},'
                f'"ts":{piece.start_s * 1e6:.3f},"dur":{piece.length_s * 1e6:.3f}}}'
            )


def _naming(kind: str, thread: int, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": 1, "tid": thread, "args": arguments})
