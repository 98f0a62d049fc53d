"""Mutated records through both doors: each is accepted and valid, or in quarantine with a reason and its whole payload.

What was accepted is read back from the lake and checked by a validator of its own, which shares no code with the rules.
"""

import dataclasses
import hashlib
import json
import math
import random
import secrets

import numpy as np
import pyarrow as pa
import pytest
from gate_cases import arrow_of, foreign, open_store, record_of

from hotpot.experience import RULES, ArrowRecords, open_run
from hotpot.experience.gate.door import records_of
from hotpot.experience.gate.gate import payload_json
from hotpot.experience.gate.rules import OTHER_REASONS
from hotpot.testing.records import make_fork, make_leases, make_trajectory
from hotpot.types import SCHEMA_VERSION, StepRow, TrajectoryRow

VOCABULARY = 64
BATCH = 40


def odd_value(dice):
    return dice.choice(
        [
            None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 0.0, -0.5, 1e300, math.nan, math.inf, -math.inf,
            "", "x", "nan", "\ud800", "a" * 500, b"bytes", [], [1, "2"], [[1]], (), ("a",), {}, {"a": [1]}, object(),
            np.int64(3), np.float32(0.5), np.zeros(3, np.float64), np.array([1, 2], np.int32), np.array([object()]),
            {1, 2}, 10**400, 10**5000, [10**5000],
        ]
    )  # fmt: skip


def nudged(dice, value):
    """Return something near ``value``: another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + dice.choice([-1, 1, 7, -1000])
    if isinstance(value, float):
        return dice.choice([value + 0.5, -value, value * (1 + 1e-9), math.nan])
    if isinstance(value, str):
        return dice.choice([value + "x", value[1:], value.upper(), ""])
    if isinstance(value, np.ndarray) and value.size and value.dtype != object:
        changed = value.copy()
        place = dice.randrange(value.size)
        with np.errstate(all="ignore"):
            changed[place] = dice.choice([changed[place] + 1, -1, 0, changed[place] * 2])
        return dice.choice([changed, value[:-1], value[::-1].copy(), np.concatenate([value, value[:1]])])
    if isinstance(value, list | tuple) and value:
        items = list(value)
        place = dice.randrange(len(items))
        dice.choice(
            [
                lambda: items.__setitem__(place, nudged(dice, items[place])),
                lambda: items.pop(place),
                lambda: items.insert(place, items[place]),
                items.reverse,
                lambda: items.__setitem__(place, odd_value(dice)),
            ]
        )()
        return type(value)(items)
    return odd_value(dice)


def mutated_dataclass(dice, made):
    kind = dice.random()
    if kind < 0.03:
        return dice.choice([None, "record", 7, {"row": 1}, made.row, object(), [made]])
    if kind < 0.08:
        return dataclasses.replace(made, row=dice.choice([None, made.steps[0], odd_value(dice)]))
    if kind < 0.16:
        steps = dice.choice(
            [
                (),
                list(made.steps),
                made.steps[::-1],
                made.steps[:-1],
                made.steps + made.steps[-1:],
                odd_value(dice),
            ]
        )
        return dataclasses.replace(made, steps=steps)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        if dice.random() < 0.4:
            made = dataclasses.replace(made, row=mutated_row(dice, made.row, TrajectoryRow))
        else:
            steps = list(made.steps)
            place = dice.randrange(len(steps))
            steps[place] = mutated_row(dice, steps[place], StepRow)
            made = dataclasses.replace(made, steps=tuple(steps))
    return made


def mutated_row(dice, row, cls):
    name = dice.choice([field.name for field in dataclasses.fields(cls)])
    value = getattr(row, name)
    return dataclasses.replace(row, **{name: nudged(dice, value) if dice.random() < 0.6 else odd_value(dice)})


def mutated_mapping(dice, record):
    if dice.random() < 0.03:
        return odd_value(dice)
    record = json.loads(json.dumps(record))
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        steps = record.get("steps")
        inner = dice.choice([record, record.get("row"), *(steps if isinstance(steps, list) else [])])
        if not isinstance(inner, dict) or not inner:
            continue
        key = dice.choice(list(inner))
        action = dice.random()
        if action < 0.15:
            del inner[key]
        elif action < 0.25:
            inner[dice.choice(["more", "", "row"])] = odd_value(dice)
        else:
            inner[key] = nudged(dice, inner[key]) if action < 0.65 else odd_value(dice)
    return record


def mutated_arrow(dice, made):
    """Return mutated tables, and the records in them as the door sees them."""
    tables = arrow_of(made, dice.choice([1, 2, 2, 2]))
    names = ("trajectories", "steps")
    for _ in range(dice.choice([1, 1, 2])):
        name = dice.choice(names)
        table = getattr(tables, name)
        place = dice.randrange(table.num_columns)
        column = table.column_names[place]
        action = dice.randrange(7)
        if action == 0:
            table = table.remove_column(place)
        elif action == 1:
            table = table.append_column(dice.choice([column, "more"]), table.column(place))
        elif action == 2:
            table = table.set_column(place, column, pa.nulls(table.num_rows, table.column(place).type))
        elif action == 3:
            table = table.set_column(place, column, pa.array(["x"] * table.num_rows))
        elif action == 4:
            table = table.replace_schema_metadata(
                dice.choice(
                    [None, {"schema_version": "3"}, {"schema_version": "\xff"}, {"schema_version": ""}]
                )
            )
        elif action == 5:
            table = table.take([dice.randrange(table.num_rows) for _ in range(table.num_rows)])
        else:
            kept = [value for value in table.column(place).to_pylist() if value is not None]
            values = [nudged(dice, kept[0]) if kept else None] * table.num_rows
            try:
                table = table.set_column(place, column, pa.array(values))
            except (pa.ArrowException, UnicodeEncodeError, OverflowError):
                continue
        tables = dataclasses.replace(tables, **{name: table})
    return tables


# ---- what is valid, said once more and otherwise ----


def chained(tokens, link):
    return hashlib.sha256(link.encode() + np.array(tokens, "<i4").tobytes()).hexdigest()[:32]


def complaints(row, steps):
    """Yield what is wrong with a trajectory as it was read from the lake (rows as plain mappings)."""
    if (
        [step["step"] for step in steps] != list(range(len(steps)))
        or row["num_steps"] != len(steps)
        or not steps
    ):
        yield "steps"
    clock, link, context, segment = row["started_us"], "", 0, 0
    for step in steps:
        if step["segment"] != segment:
            link, context, segment = "", 0, step["segment"]
        given, sampled = step["prompt_tokens"], step["sampled_tokens"]
        if not all(0 <= token < VOCABULARY for token in given + sampled):
            yield "tokens"
        for name in ("behaviour_logprobs", "model_logprobs"):
            if len(step[name]) != len(sampled) or not all(-math.inf < value <= 1e-5 for value in step[name]):
                yield name
        if sum(step["span_length"]) != len(given) + len(sampled) or len(step["span_stage"]) != len(
            step["span_length"]
        ):
            yield "spans"
        if sum(step["span_policy_length"]) != len(sampled):
            yield "policy spans"
        context, link = context + len(given), chained(given, link)
        if (step["context_tokens"], step["prefix_hash"]) != (context, link):
            yield "context"
        context, link = context + len(sampled), chained(sampled, link)
        if not clock <= step["started_us"] <= step["generated_us"] <= step["finished_us"]:
            yield "times"
        clock = step["finished_us"]
        if not math.isclose(step["reward"], sum(step["reward_values"]), rel_tol=1e-6, abs_tol=1e-6):
            yield "step reward"
        for name in (
            "run_id",
            "attempt_id",
            "group_id",
            "task_id",
            "env_version",
            "reward_version",
            "prompt_version",
        ):
            if step[name] != row[name] or not row[name]:
                yield name
    if clock > row["finished_us"]:
        yield "end"
    total = sum(sum(step["reward_values"]) for step in steps)
    if not math.isclose(row["reward"], total, rel_tol=1e-6, abs_tol=1e-6):
        yield "reward"
    if row["run_id"] != "run" or row["schema_version"] != SCHEMA_VERSION:
        yield "run"
    if row["num_sampled_tokens"] != sum(len(step["sampled_tokens"]) for step in steps):
        yield "sums"
    if (
        row["task_id"]
        != "t-" + hashlib.sha256(f"{row['env']}\n{row['task_content']}".encode()).hexdigest()[:20]
    ):
        yield "task"


class Count:
    """What was brought and what the store said of it."""

    def __init__(self):
        self.brought, self.accepted, self.payloads = 0, [], []

    def take(self, records, report):
        self.brought += len(records)
        self.accepted += report.accepted
        assert len(report.accepted) + len(report.quarantined) == len(records)
        self.payloads += [
            (reason, detail) for (_, reason), detail in zip(report.quarantined, report.details, strict=True)
        ]


def bring(store, dice, count, number):
    """Bring one batch of mutated records through a door drawn by lot."""
    made = [
        make_trajectory(issue=number * BATCH + place, num_steps=dice.randint(1, 3), vocabulary=VOCABULARY)
        for place in range(BATCH)
    ]
    made += [make_fork(one, dice.randrange(len(one.steps))) for one in made[:4]]
    door = number % 3
    if door == 0:
        store.ledger.lease(make_leases(made))
        records = [one if dice.random() < 0.05 else mutated_dataclass(dice, one) for one in made]
        records += [dice.choice(records)] if dice.random() < 0.3 else []
        count.take(records, store.append(records))
        return records
    made = [foreign(one) for one in made]
    if door == 1:
        records = [
            record_of(one, dice.choice([1, 2]))
            if dice.random() < 0.05
            else mutated_mapping(dice, record_of(one, dice.choice([1, 2])))
            for one in made
        ]
        count.take(records, store.append_records(records, producer="peer"))
        return records
    records = []
    for start in range(0, len(made), 4):
        tables = mutated_arrow(dice, made[start : start + 4])
        found = records_of(tables)
        count.take(found, store.append_records(tables, producer="arrow"))
        records += found
    return records


def fuzz(folder, seed, num_records):
    dice, count, number, brought = random.Random(seed), Count(), 0, []
    with open_store(folder) as store:
        while count.brought < num_records:
            brought += [payload_json(record) for record in bring(store, dice, count, number)]
            number += 1
    reader = open_run(folder)
    steps: dict[str, list] = {}
    for step in sorted(reader.table("steps").to_pylist(), key=lambda step: step["step"]):
        steps.setdefault(step["trajectory_id"], []).append(step)
    rows = reader.table("trajectories").to_pylist()
    assert sorted(row["trajectory_id"] for row in rows) == sorted(count.accepted)
    assert set(steps) == set(count.accepted)
    for row in rows:
        assert not list(complaints(row, steps[row["trajectory_id"]])), (seed, row["trajectory_id"])
    refused = reader.table("quarantine").to_pylist()
    assert len(refused) == len(count.payloads) == count.brought - len(rows)
    assert len({row["quarantine_id"] for row in refused}) == len(refused)
    for row in refused:
        assert row["reason"] in RULES or row["reason"] in OTHER_REASONS
        assert row["detail"]
        json.loads(row["payload"])
    missing = set(brought) - {row["payload"] for row in refused}
    assert len(missing) <= len(rows)  # what is in neither form was accepted
    assert 0 < len(rows) < count.brought
    states = {row["state"] for row in reader.table("attempts", ["state"]).to_pylist()}
    assert states <= {"finished", "dropped"}
    return len(rows), len(refused), {row["reason"] for row in refused}


def test_mutated_records_are_accepted_and_valid_or_quarantined(tmp_path):
    fuzz(tmp_path / "run", 0, 400)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3, 4, "random"])
def test_ten_thousand_mutated_records(tmp_path, seed):
    chosen = secrets.randbits(32) if seed == "random" else seed
    print(f"seed {chosen}")  # noqa: T201
    accepted, refused, reasons = fuzz(tmp_path / "run", chosen, 2_100)
    print(f"{accepted} accepted, {refused} refused: {sorted(reasons)}")  # noqa: T201
    assert len(reasons) >= 15


def test_the_validator_can_fail():
    one = make_trajectory()
    record = record_of(one)
    assert not list(complaints(record["row"], record["steps"]))
    record["steps"][0]["sampled_tokens"][0] ^= 1
    record["row"]["reward"] += 1
    assert set(complaints(record["row"], record["steps"])) == {"context", "reward"}
    assert isinstance(arrow_of([one]), ArrowRecords)
