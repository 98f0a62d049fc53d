import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from hotpot.errors import StoreError
from hotpot.experience import COLUMNS, SCHEMAS, from_table, to_table
from hotpot.experience.records.schema import group_rows
from hotpot.testing.records import make_row, make_trajectory
from hotpot.types import SCHEMA_VERSION, TABLES, EventRow, StepRow, UpdateRow


def equal(a, b):
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        else:
            assert x == y
            assert type(x) is type(y)


@pytest.mark.parametrize("table", TABLES)
def test_schema_says_what_it_holds(table):
    schema = SCHEMAS[table]
    assert schema.metadata == {b"table": table.encode(), b"schema_version": str(SCHEMA_VERSION).encode()}
    assert schema.names == [field.name for field in dataclasses.fields(TABLES[table])]
    for field, column in zip(schema, COLUMNS[table], strict=True):
        assert field.metadata[b"meaning"]
        assert b"unit" in field.metadata
        assert field.nullable == column.nullable


def test_schema_types_follow_the_rules():
    schema = SCHEMAS["steps"]
    assert schema.field("step").type == pa.int64()
    assert schema.field("reward").type == pa.float64()
    assert schema.field("tool_error").type == pa.bool_()
    assert schema.field("tool_name").nullable
    assert schema.field("prompt_tokens").type.value_type == pa.int32()
    assert schema.field("model_logprobs").type.value_type == pa.float32()
    assert schema.field("span_stage").type.value_type == pa.string()
    assert not schema.field("span_stage").type.value_field.nullable
    assert SCHEMAS["updates"].field("losses").type.value_type == pa.float64()


def test_rows_come_back_as_they_went():
    steps = [step for issue in range(5) for step in make_trajectory(issue=issue, num_steps=3).steps]
    table = to_table("steps", steps)
    table.validate(full=True)
    for before, after in zip(steps, from_table("steps", table), strict=True):
        equal(before, after)
    # The same from several chunks, from a slice, and with the columns in another order.
    chunked = pa.concat_tables([table.slice(0, 4), table.slice(4)]).select(table.column_names[::-1])
    for before, after in zip(steps, from_table("steps", chunked), strict=True):
        equal(before, after)
    for before, after in zip(steps[7:9], from_table("steps", table.slice(7, 2)), strict=True):
        equal(before, after)


@pytest.mark.parametrize("table", TABLES)
def test_every_table_round_trips_plain_and_empty(table):
    row = make_row(TABLES[table])
    equal(row, from_table(table, to_table(table, [row]))[0])
    assert to_table(table, []).num_rows == 0
    assert from_table(table, to_table(table, [])) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("step", 1.5),
        ("step", True),
        ("step", 2**70),
        ("step", None),
        ("run_id", b"bytes"),
        ("run_id", None),
        ("run_id", "\ud800"),
        ("reward", "1"),
        ("tool_error", 1),
        ("prompt_tokens", np.zeros(2, np.int64)),
        ("prompt_tokens", np.zeros((1, 2), np.int32)),
        ("prompt_tokens", [1, 2]),
        ("span_stage", (None,)),
        ("span_length", (1.5,)),
        ("span_length", None),
    ],
)
def test_a_wrong_type_is_refused_by_name(column, value):
    good = make_trajectory().steps[0]
    bad = dataclasses.replace(good, **{column: value})
    with pytest.raises(StoreError, match=f"steps.{column}"):
        to_table("steps", [good, bad])


def test_a_nullable_column_takes_null_and_a_missing_one_is_named():
    steps = make_trajectory(num_steps=2).steps
    table = to_table("steps", steps)
    assert table.column("tool_name").to_pylist() == ["find", None]
    with pytest.raises(StoreError, match="tool_name"):
        from_table("steps", table.drop_columns(["tool_name"]))


def test_rows_are_grouped_by_class():
    rows = [make_row(EventRow), make_row(UpdateRow), make_row(EventRow)]
    grouped = group_rows(rows)
    assert {name: len(found) for name, found in grouped.items()} == {"events": 2, "updates": 1}
    with pytest.raises(StoreError, match="is not a row of any table"):
        group_rows([object()])


def test_float_columns_take_integers_and_numpy_scalars():
    row = make_row(UpdateRow, loss=np.float32(0.5), learning_rate=1, update=np.int64(3))
    table = to_table("updates", [row])
    assert table.column("loss").to_pylist() == [0.5]
    assert table.column("learning_rate").to_pylist() == [1.0]
    assert table.column("update").to_pylist() == [3]


def test_step_row_is_a_table():
    assert TABLES["steps"] is StepRow
