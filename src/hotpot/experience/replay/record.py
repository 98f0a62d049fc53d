"""What replay asks of the record: narrow columns for the index, whole trajectories for the blocks.

Owns the questions. Everything is read through :class:`RunReader`, so lakes on S3, compacted ones, those of older schema
versions and the log's tail answer alike. Knows no cache and no index.

The log segment a trajectory came through stays the same whatever happens to the lake's files, so it is the address that
blocks are read by. A segment is read as a block only where it is not above a watermark: then it is complete.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotpot.experience.reading.reader import RunReader
from hotpot.experience.replay.block import Block
from hotpot.experience.replay.index import SCHEMA, UNKNOWN_SEGMENT
from hotpot.types import EndReason, Purpose, Split

_TRAINED = (
    f"purpose = '{Purpose.TRAINING.value}' AND split = '{Split.TRAIN.value}' "
    f"AND end_reason <> '{EndReason.MAX_SECONDS.value}'"
)

# The alias names the table, by which the reader knows which ones a query needs.
_LINES = f"""
    WITH learned AS (SELECT group_id, min("update") AS "update" FROM groups GROUP BY group_id)
    SELECT trajectory_id, group_id, env, reward, success, num_prompt_tokens + num_sampled_tokens AS num_tokens,
      "update", CASE WHEN _segment <= ? THEN _segment ELSE {UNKNOWN_SEGMENT} END AS segment
    FROM recorded_trajectories AS trajectories JOIN learned USING (group_id) WHERE {_TRAINED}"""


def read_lines(reader: RunReader) -> tuple[int, pa.Table]:
    """Return the watermark, and a line of the index for every trajectory that an update learned fresh, in any order."""
    watermark = reader.watermark()
    return watermark, reader.sql(_LINES, [watermark]).cast(SCHEMA)


def read_last_update(reader: RunReader) -> int:
    """Return the number of the last recorded update, 0 where there is none."""
    (row,) = reader.sql('SELECT coalesce(max("update"), 0) AS last FROM updates').to_pylist()
    return int(row["last"])


def read_replayed(reader: RunReader) -> list[tuple[int, list[str]]]:
    """Return (update, ids of what it replayed), by update."""
    found = reader.sql(
        'SELECT "update", list(trajectory_id) AS ids FROM consumptions '
        "WHERE source IN ('hot', 'cold') GROUP BY 1 ORDER BY 1"
    )
    return [(row["update"], row["ids"]) for row in found.to_pylist()]


def read_places(reader: RunReader, ids: Sequence[str], *, above: int) -> tuple[int, dict[str, int]]:
    """Return the watermark, and the log segment of each of the trajectories ``ids`` that came through one above ``above``.

    What came through a segment above the watermark may still be in the log.
    """
    watermark = reader.watermark()
    found = reader.sql(
        "SELECT trajectory_id, _segment AS segment FROM recorded_trajectories AS trajectories "
        "WHERE _segment > ? AND trajectory_id IN (SELECT unnest(?))",
        [above, list(ids)],
    )
    return watermark, _pairs(found)


def read_blocks(reader: RunReader, segments: Collection[int]) -> dict[int, Block]:
    """Return the trained trajectories of log segments of the lake, a block each. Empty where a segment has none."""
    listed = ", ".join(map(str, sorted(segments)))
    numbers = reader.sql(
        "SELECT trajectory_id, _segment AS segment FROM recorded_trajectories AS trajectories "
        f"WHERE _segment IN ({listed})"
    )
    of_trajectory = _pairs(numbers)
    rows = reader.table("trajectories", where=f"_segment IN ({listed}) AND {_TRAINED}")
    steps = reader.table("steps", where=f"_segment IN ({listed}) AND purpose = '{Purpose.TRAINING.value}'")
    row_segments, step_segments = (_numbers(table, of_trajectory) for table in (rows, steps))
    return {
        segment: Block.arranged(
            rows.filter(pa.array(row_segments == segment)), steps.filter(pa.array(step_segments == segment))
        )
        for segment in segments
    }


def read_block(reader: RunReader, ids: Sequence[str], *, above: int) -> Block:
    """Return those of the trajectories ``ids`` that came through a log segment above ``above``, from lake or log."""
    where = "_segment > ? AND trajectory_id IN (SELECT unnest(?))"
    rows, steps = (
        reader.table(name, where=where, params=[above, list(ids)]) for name in ("trajectories", "steps")
    )
    return Block.arranged(rows, steps)


def _pairs(table: pa.Table) -> dict[str, int]:
    keys: list[Any] = table.column(0).to_pylist()
    values: list[Any] = table.column(1).to_pylist()
    return dict(zip(keys, values, strict=True))


def _numbers(table: pa.Table, segments: dict[str, int]) -> NDArray[np.int64]:
    ids: list[Any] = table.column("trajectory_id").to_pylist()
    return np.fromiter((segments.get(name, UNKNOWN_SEGMENT) for name in ids), np.int64, len(ids))
