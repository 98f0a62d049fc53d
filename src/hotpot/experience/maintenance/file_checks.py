"""Checks of a lake's files: what Delta's log promises lies there, can be read, and adds up to what was published.

Owns the way from files to row counts by log segment. Knows the hidden columns, no record. Parquet as Delta writes it here
carries no checksums of its own, so ``deep`` decodes every page: that finds what can't be decoded, and the checks of the
records (:mod:`record_checks`) find most of what can.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hotpot.errors import StoreError
from hotpot.experience.lake.lake import ROW_COLUMN, SEGMENT_COLUMN, Lake
from hotpot.experience.maintenance.findings import Counts, Finding, capped
from hotpot.experience.maintenance.tables import (
    LAKE_TABLES,
    SEGMENTS,
    DataFile,
    TableFolder,
    data_files,
    folder_of,
    read_columns,
)
from hotpot.types import TABLES

_MAGIC = b"PAR1"


@dataclass(slots=True, kw_only=True)
class LakeFacts:
    """What the files say: by table, its rows by log segment; ``damaged`` tables can't be asked."""

    rows: dict[str, Counter[int]] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)


def check_files(lake: Lake, counts: Counts, facts: LakeFacts, *, deep: bool) -> Iterator[Finding]:
    """Yield what is wrong with the files of every table; fills ``counts`` and ``facts``."""
    for name in LAKE_TABLES:
        yield from _check_table(lake, name, counts, facts, deep=deep)


def check_segments(
    lake: Lake, watermark: int, counts: Counts, facts: LakeFacts, deleted: dict[str, Counter[int]]
) -> Iterator[Finding]:
    """Yield where the tables' rows are not those their log segments brought, less the ``deleted`` ones.

    Looks at the log segments up to ``watermark``, which was read before ``facts``.
    """
    folder, files = folder_of(lake, SEGMENTS), data_files(lake, SEGMENTS)
    if folder is None or SEGMENTS in facts.damaged:
        return
    published = read_columns(folder, files, ["segment", "tables", "table_rows"]).to_pylist()
    published = [row for row in published if row["segment"] <= watermark]
    yield from _check_numbers([row["segment"] for row in published], watermark)
    wanted: dict[str, Counter[int]] = {}
    for row in published:
        for name, rows in zip(row["tables"], row["table_rows"], strict=True):
            wanted.setdefault(name, Counter())[row["segment"]] += rows
    for name in TABLES:
        if name in facts.damaged:
            continue
        there = facts.rows.get(name, Counter())
        counts.unpublished_rows += sum(rows for number, rows in there.items() if number > watermark)
        due, gone = wanted.get(name, Counter()), deleted.get(name, Counter())
        yield from capped(
            "segment_rows",
            name,
            (
                f"log segment {number} brought {due[number]} rows, {gone[number]} were deleted, "
                f"but {there[number]} are there; restore the table from a copy"
                for number in sorted({*due, *(one for one in there if one <= watermark)})
                if there[number] != due[number] - gone[number]
            ),
        )


def _check_numbers(numbers: list[int], watermark: int) -> Iterator[Finding]:
    times = Counter(numbers)
    missing = [number for number in range(1, watermark + 1) if not times[number]]
    repeated = [number for number, count in times.items() if count > 1]
    yield from capped(
        "segment_gap",
        SEGMENTS,
        (f"log segment {number} below watermark {watermark} was never published" for number in missing),
    )
    yield from capped(
        "segment_twice",
        SEGMENTS,
        (f"log segment {number} was published twice" for number in sorted(repeated)),
    )


def _check_table(lake: Lake, name: str, counts: Counts, facts: LakeFacts, *, deep: bool) -> Iterator[Finding]:
    try:
        folder, files = folder_of(lake, name), data_files(lake, name)
    except StoreError as error:
        facts.damaged.add(name)
        yield Finding(check="table_unreadable", table=name, detail=str(error))
        return
    if folder is None:
        return
    lying = folder.listing()
    counts.tables += 1
    counts.files += len(files)
    counts.num_bytes += sum(file.size for file in files)
    _count_unused(folder, lying, {file.path for file in files}, counts)
    sound = []
    for file in files:
        finding = _check_file(folder, file, lying, deep=deep)
        if finding is None:
            sound.append(file)
        else:
            facts.damaged.add(name)
            yield finding
    if len(sound) == len(files) and files:
        yield from _check_rows(folder, files, counts, facts)


def _check_file(folder: TableFolder, file: DataFile, lying: dict[str, int], *, deep: bool) -> Finding | None:
    where = f"{folder.uri}/{file.path}"
    size = lying.get(file.path)
    check, detail = "", ""
    if size is None:
        check, detail = "missing_file", f"{where} is on Delta's log but does not lie there"
    elif size != file.size:
        check, detail = "wrong_size", f"{where} has {size} bytes, Delta's log says {file.size}"
    else:
        try:
            check, detail = _check_content(folder, file, where, deep=deep)
        except (OSError, pa.ArrowException) as error:
            check, detail = "unreadable_file", f"{where}: {error}"
    if not check:
        return None
    return Finding(check=check, table=folder.table, detail=f"{detail}; restore it from a copy")


def _check_content(folder: TableFolder, file: DataFile, where: str, *, deep: bool) -> tuple[str, str]:
    with folder.open(file.path) as parquet:
        rows = parquet.metadata.num_rows
        if file.num_rows is not None and rows != file.num_rows:
            return "wrong_row_count", f"{where} has {rows} rows, Delta's log says {file.num_rows}"
        if deep:
            for batch in parquet.iter_batches():
                batch.validate(full=True)
    return "", ""


def _check_rows(
    folder: TableFolder, files: list[DataFile], counts: Counts, facts: LakeFacts
) -> Iterator[Finding]:
    if folder.table == SEGMENTS:
        return
    try:
        rows = read_columns(folder, files, [SEGMENT_COLUMN, ROW_COLUMN])
    except StoreError as error:
        facts.damaged.add(folder.table)
        yield Finding(check="unreadable_file", table=folder.table, detail=str(error))
        return
    counts.rows += rows.num_rows
    numbers: Any = pc.value_counts(rows.column(SEGMENT_COLUMN))
    facts.rows[folder.table] = Counter({one["values"]: one["counts"] for one in numbers.to_pylist()})
    places = rows.group_by([SEGMENT_COLUMN, ROW_COLUMN]).aggregate([([], "count_all")])
    twice = places.filter(pc.greater(places.column("count_all"), pa.scalar(1)))
    yield from capped(
        "row_twice",
        folder.table,
        (
            f"row {row[ROW_COLUMN]} of log segment {row[SEGMENT_COLUMN]} is there {row['count_all']} times; "
            "restore the table from a copy"
            for row in twice.sort_by(SEGMENT_COLUMN).to_pylist()
        ),
    )


def _count_unused(folder: TableFolder, lying: dict[str, int], used: set[str], counts: Counts) -> None:
    for path, size in lying.items():
        if path not in used:
            counts.unused_files += 1
            counts.unused_bytes += size
            counts.half_files += not folder.ends_with(path, size, _MAGIC)
