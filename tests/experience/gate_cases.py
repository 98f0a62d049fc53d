"""Records as other programs bring them, for the tests of the door, of requeueing and of fuzzed records."""

import dataclasses
import json

import pyarrow as pa

from hotpot.config import GateSection, StoreSection
from hotpot.experience import SCHEMAS, ArrowRecords, ExperienceStore
from hotpot.experience.gate.gate import payload_json
from hotpot.experience.records.schema import to_table
from hotpot.testing.records import make_trajectory
from hotpot.types import SCHEMA_VERSION

NO_BREAKER = GateSection(breaker_share=1.0)


def foreign(trajectory, prefix="peer:"):
    """Return a trajectory under ids that another program would give it."""
    row = trajectory.row
    ids = {
        name: prefix + getattr(row, name)
        for name in ("attempt_id", "trajectory_id", "episode_id", "group_id")
    }
    parent = row.parent_trajectory_id
    moved = dataclasses.replace(row, **ids, parent_trajectory_id=None if parent is None else prefix + parent)
    steps = tuple(dataclasses.replace(step, **ids) for step in trajectory.steps)
    return dataclasses.replace(trajectory, row=moved, steps=steps)


def record_of(trajectory, version=SCHEMA_VERSION):
    """Return a trajectory as a mapping of JSON's values, as a release of schema ``version`` would have written it."""
    record = {"schema_version": version, **json.loads(payload_json(trajectory))}
    for row in (record["row"], *record["steps"]):
        row["schema_version"] = version
    return record


def make_record(version=SCHEMA_VERSION, **keywords):
    return record_of(foreign(make_trajectory(**keywords)), version)


def arrow_of(trajectories, version=SCHEMA_VERSION):
    """Return trajectories as two self-describing Arrow tables."""
    steps = to_table("steps", [step for one in trajectories for step in one.steps])
    rows = to_table("trajectories", [one.row for one in trajectories])
    if version != SCHEMA_VERSION:
        steps, rows = (_said(table, version) for table in (steps, rows))
    said = {b"schema_version": str(version).encode()}
    return ArrowRecords(
        trajectories=rows.replace_schema_metadata({**SCHEMAS["trajectories"].metadata, **said}),
        steps=steps.replace_schema_metadata({**SCHEMAS["steps"].metadata, **said}),
    )


def _said(table, version):
    place = table.schema.get_field_index("schema_version")
    values = pa.array([version] * table.num_rows)
    return table.set_column(place, table.schema.field(place), values)


def open_store(folder, *, gate=NO_BREAKER, **keywords):
    return ExperienceStore.open(
        folder, run_id="run", settings=StoreSection(), vocabulary_size=64, gate=gate, **keywords
    )
