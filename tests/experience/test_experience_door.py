"""Records of other programs: read, upgraded, refused with a reason; never a crash, nothing lost."""

import base64
import dataclasses
import json
import math

import pyarrow as pa
import pytest
from gate_cases import arrow_of, foreign, make_record, open_store, record_of

from hotpot.config import GateSection
from hotpot.errors import StoreError
from hotpot.experience import (
    ArrowRecords,
    RunReader,
    open_run,
    read_trajectories,
    to_table,
)
from hotpot.experience.gate.door import read_record, records_of
from hotpot.experience.gate.gate import Refusal
from hotpot.testing.records import (
    ENV_VERSION,
    make_fork,
    make_group,
    make_leases,
    make_row,
    make_trajectory,
)
from hotpot.types import SCHEMA_VERSION, VersionRow


def same(one, other):
    return to_table("trajectories", [one.row]).equals(to_table("trajectories", [other.row])) and to_table(
        "steps", one.steps
    ).equals(to_table("steps", other.steps))


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_a_record_is_the_trajectory_it_describes_whatever_known_version_wrote_it(version):
    made = foreign(make_trajectory(num_steps=3))
    text = json.dumps(record_of(made, version))
    assert same(read_record(json.loads(text)), made)
    (record,) = records_of(arrow_of([made], version))
    assert same(read_record(record), made)


def without(record, *path):
    *head, last = path
    inner = record
    for key in head:
        inner = inner[key]
    del inner[last]
    return record


def changed(value, *path):
    record = make_record()
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return record


MALFORMED = {
    "nothing": (None, "malformed"),
    "text": ("record", "malformed"),
    "a key too many": (make_record() | {"more": 1}, "malformed"),
    "no steps": (without(make_record(), "steps"), "malformed"),
    "steps of text": (changed("steps", "steps"), "malformed"),
    "step of text": (changed("step", "steps", 0), "malformed"),
    "no version": (changed(None, "schema_version"), "schema_version"),
    "newer version": (changed(SCHEMA_VERSION + 1, "schema_version"), "schema_version"),
    "version of text": (changed("2", "schema_version"), "schema_version"),
    "bool version": (changed(True, "schema_version"), "schema_version"),
    "two versions": (changed(SCHEMA_VERSION + 1, "row", "schema_version"), "malformed"),
    "column missing": (without(make_record(), "row", "reward"), "malformed"),
    "step column missing": (without(make_record(), "steps", 1, "seed"), "malformed"),
    "column too many": (changed(1, "steps", 0, "more"), "malformed"),
    "null where none may be": (changed(None, "row", "reward"), "malformed"),
    "text for a number": (changed("1", "row", "reward"), "malformed"),
    "float for an int": (changed(1.0, "row", "num_steps"), "malformed"),
    "bool for an int": (changed(True, "row", "num_steps"), "malformed"),
    "more than 64 bits": (changed(2**63, "row", "started_us"), "malformed"),
    "token over 32 bits": (changed([2**31], "steps", 0, "sampled_tokens"), "malformed"),
    "token of text": (changed(["1"], "steps", 0, "sampled_tokens"), "malformed"),
    "list in a list": (changed([[1]], "steps", 0, "sampled_tokens"), "malformed"),
    "number for a list": (changed(1, "steps", 0, "span_stage"), "malformed"),
    "huge number": (changed(10**400, "row", "reward"), "malformed"),
}


@pytest.mark.parametrize(("record", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_what_cannot_be_read_is_refused_in_words(record, reason):
    found = read_record(record)
    assert isinstance(found, Refusal)
    assert found.reason == reason
    assert len(found.detail) > 20


def test_numbers_that_are_none_come_back_and_the_rules_refuse_them(tmp_path):
    record = changed(
        ["nan"] * len(make_record()["steps"][0]["behaviour_logprobs"]), "steps", 0, "behaviour_logprobs"
    )
    assert all(math.isnan(value) for value in read_record(record).steps[0].behaviour_logprobs)
    with open_store(tmp_path / "run") as store:
        assert store.append_records([record], producer="peer").quarantined == (("peer:0.0.0", "logprobs"),)


def test_records_enter_beside_our_own_and_the_rest_is_quarantined_whole(tmp_path):
    good = [make_record(version, issue=version) for version in (1, 2)]
    bad = [value for value, _ in MALFORMED.values()]
    with open_store(tmp_path / "run") as store:
        own = make_group(size=2)
        store.ledger.lease(make_leases(own))
        store.append(own)
        report = store.append_records([*good, *bad], producer="peer")
        assert report.accepted == ("peer:1.0.0", "peer:2.0.0")
        assert [reason for _, reason in report.quarantined] == [reason for _, reason in MALFORMED.values()]
        assert store.ledger.counts().finished == 4
    reader = open_run(tmp_path / "run")
    rows = reader.table("quarantine").to_pylist()
    assert {row["producer"] for row in rows} == {"peer"}
    assert len({row["quarantine_id"] for row in rows}) == len(bad)
    assert [json.loads(row["payload"]) for row in rows] == bad
    assert {row["schema_version"] for row in reader.table("trajectories").to_pylist()} == {SCHEMA_VERSION}


def test_arrow_tables_that_do_not_fit_lose_nothing():
    made = [foreign(make_trajectory(issue=issue)) for issue in range(2)]
    good = arrow_of(made)
    shuffled = ArrowRecords(
        trajectories=good.trajectories, steps=good.steps.take(list(reversed(range(good.steps.num_rows))))
    )
    assert all(same(read_record(record), one) for record, one in zip(records_of(shuffled), made, strict=True))
    bare = ArrowRecords(trajectories=good.trajectories.replace_schema_metadata(None), steps=good.steps)
    assert [read_record(record).reason for record in records_of(bare)] == ["schema_version"] * 2
    orphans = ArrowRecords(trajectories=good.trajectories.slice(0, 1), steps=good.steps)
    found = records_of(orphans)
    assert [isinstance(read_record(record), Refusal) for record in found] == [False, True]
    assert len(found[1]["steps"]) == len(made[1].steps)
    twice = good.steps.append_column("run_id", good.steps["run_id"])
    (lost,) = records_of(ArrowRecords(trajectories=good.trajectories, steps=twice))
    assert read_record(lost).reason == "malformed"
    stored = pa.ipc.open_stream(base64.b64decode(lost["steps"])).read_all()
    assert stored.equals(twice)
    (lost,) = records_of(ArrowRecords(trajectories="x", steps=good.steps))
    assert read_record(lost).reason == "malformed"


def test_whose_attempt_a_record_may_be(tmp_path):
    own = make_trajectory()
    with open_store(tmp_path / "run") as store:
        report = store.append_records([record_of(own)], producer="peer")
        assert report.quarantined == (("0.0.0", "attempt"),)  # the sampler may hand that id out
        peers = foreign(make_trajectory(issue=9))
        store.ledger.lease(make_leases([peers]))
        assert store.append_records([record_of(peers)], producer="peer").accepted == ("peer:9.0.0",)
        again = store.append_records([record_of(peers), make_record()], producer="peer")
        assert again.quarantined == (("peer:9.0.0", "attempt"),)
        assert again.accepted == ("peer:0.0.0",)
        odd = make_record(issue=3)
        odd["row"]["trajectory_id"] = "elsewhere"
        for step in odd["steps"]:
            step["trajectory_id"] = "elsewhere"
        assert store.append_records([odd], producer="peer").quarantined == (("elsewhere", "attempt"),)


def test_nothing_from_outside_uses_or_ends_an_attempt_that_the_run_leased(tmp_path):
    own = make_trajectory()
    broken = record_of(own)
    broken["row"]["reward"] = "bad"
    with open_store(tmp_path / "run") as store:
        store.ledger.lease(make_leases([own]))
        report = store.append_records([broken, record_of(own)], producer="peer")
        assert report.quarantined == (("0.0.0", "malformed"), ("0.0.0", "attempt"))
        assert store.append([own]).accepted == ("0.0.0",)


def test_an_attempt_falls_with_a_record_that_cannot_be_read(tmp_path):
    parent = make_trajectory(num_steps=3)
    fork = make_fork(parent, 1)
    broken = record_of(foreign(fork))
    del broken["row"]["reward"]
    with open_store(tmp_path / "run") as store:
        report = store.append_records([record_of(foreign(parent)), broken], producer="peer")
        assert [reason for _, reason in report.quarantined] == ["malformed"] * 2


def test_a_fork_of_a_recorded_parent_enters_later(tmp_path):
    parent = make_trajectory(num_steps=3)
    fork = foreign(make_fork(parent, 2, num_steps=2), "late:")
    fork = dataclasses.replace(fork, row=dataclasses.replace(fork.row, parent_trajectory_id="0.0.0"))
    stranger = dataclasses.replace(fork, row=dataclasses.replace(fork.row, parent_trajectory_id="\ud800"))
    with open_store(tmp_path / "run") as store:
        assert store.append_records([record_of(stranger)], producer="peer").quarantined[0][1] in (
            "fork",
            "not_storable",
        )
        store.ledger.lease(make_leases([parent]))
        store.append([parent])
        assert store.append_records([record_of(fork)], producer="peer").accepted == ("late:0.0.0/1",)
        store.flush()
        later = make_fork(parent, 1, num_steps=1, number=2)
        later = foreign(later, "later:")
        later = dataclasses.replace(later, row=dataclasses.replace(later.row, parent_trajectory_id="0.0.0"))
        assert store.append_records([record_of(later)], producer="peer").accepted == ("later:0.0.0/2",)
    assert len(read_trajectories(open_run(tmp_path / "run"))) == 3


def test_an_outage_of_the_record_refuses_only_forks_of_old_parents_and_blames_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("hotpot.experience.gate.entrance.REMEMBERED_PARENTS", 1)
    old, recent = make_trajectory(num_steps=3), make_trajectory(issue=1, num_steps=3)
    forks = [
        dataclasses.replace(
            each, row=dataclasses.replace(each.row, parent_trajectory_id=parent.row.trajectory_id)
        )
        for parent in (old, recent)
        for each in [foreign(make_fork(parent, 1), "late:")]
    ]
    gate = GateSection(breaker_window=4, breaker_min_records=1, breaker_share=0.1)
    with open_store(tmp_path / "run", gate=gate) as store:
        store.ledger.lease(make_leases([old, recent]))
        store.append([old, recent])
        with monkeypatch.context() as outage:
            outage.setattr(RunReader, "open", lambda *_: (_ for _ in ()).throw(StoreError("away")))
            report = store.append_records([record_of(fork) for fork in forks], producer="peer")
        assert report.accepted == ("late:1.0.0/1",)
        assert report.quarantined == (("late:0.0.0/1", "parent_unreadable"),)
        assert not report.open_producers
    refused = open_run(tmp_path / "run").sql("SELECT detail FROM quarantine").to_pylist()
    assert ["away" in row["detail"] and "requeue" in row["detail"] for row in refused] == [True]


def test_versions_must_be_explained_before_or_with_the_records(tmp_path):
    with open_store(tmp_path / "run") as store:
        store.record([make_row(VersionRow, kind="env", version="another@1+0")])
        assert store.append_records([make_record()], producer="peer").quarantined[0][1] == "unknown_version"
        told = [make_row(VersionRow, kind="env", version=ENV_VERSION)]
        assert store.append_records([make_record(issue=1)], producer="peer", versions=told).accepted
        assert store.append_records([make_record(issue=2)], producer="peer").accepted
        with pytest.raises(StoreError, match="is of run 'other'"):
            store.append_records(
                [make_record(issue=3)],
                producer="peer",
                versions=[dataclasses.replace(told[0], run_id="other")],
            )
    with open_store(tmp_path / "run", resume=True) as store:  # what was explained is known after a resume
        assert store.append_records([make_record(issue=4)], producer="peer").accepted
        other = make_trajectory(issue=5)
        other = dataclasses.replace(
            other,
            row=dataclasses.replace(other.row, env_version="new@1+0"),
            steps=tuple(dataclasses.replace(step, env_version="new@1+0") for step in other.steps),
        )
        store.ledger.lease(make_leases([other]))
        assert store.append([other]).quarantined[0][1] == "unknown_version"


def test_a_producer_that_turns_bad_is_held_off_and_let_in_again(tmp_path):
    gate = GateSection(
        breaker_window=8, breaker_min_records=4, breaker_probe_every=2, breaker_probes_to_close=2
    )
    bad = [changed(None, "row", "reward") for _ in range(4)]
    with open_store(tmp_path / "run", gate=gate) as store:
        assert not store.append_records([make_record(issue=90)], producer="good").open_producers
        report = store.append_records(bad, producer="peer")
        assert (report.open_producers, report.num_producers, report.all_open) == (("peer",), 2, False)
        held = store.append_records([make_record(issue=issue) for issue in range(4)], producer="peer")
        assert [reason for _, reason in held.quarantined] == ["breaker_open"] * 2
        assert held.accepted == ("peer:1.0.0", "peer:3.0.0")
        assert held.open_producers == ()  # two good ones in a row
        assert len(store.append_records([make_record(issue=9)], producer="peer").accepted) == 1
    events = open_run(tmp_path / "run").sql("SELECT kind, detail FROM events ORDER BY time_us").to_pylist()
    assert [row["kind"] for row in events] == ["breaker_opened", "breaker_closed"]
    assert json.loads(events[0]["detail"])["producer"] == "peer"
    assert "malformed" in json.loads(events[0]["detail"])["example"]


def test_a_record_that_was_cut_off_before_the_log_may_be_brought_again(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with open_store(folder) as store:
        with monkeypatch.context() as patched:
            patched.setattr(store._journal, "write", lambda *_, **__: raise_(StoreError("disk full")))
            with pytest.raises(StoreError, match="disk full"):
                store.append_records([make_record()], producer="peer")
        assert store.ledger.counts().total == 0
    with open_store(folder, resume=True) as store:
        assert store.append_records([make_record()], producer="peer").accepted == ("peer:0.0.0",)
        assert store.ledger.counts().finished == 1


def raise_(error):
    raise error
