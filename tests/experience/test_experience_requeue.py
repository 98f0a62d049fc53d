"""Refused records looked at and brought back: accepted once, linked, and never lost."""

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest
from gate_cases import NO_BREAKER, foreign, make_record, open_store, record_of

from hotpot.config import GateSection
from hotpot.errors import UsageError
from hotpot.experience import from_table, list_refused, open_run, read_trajectories, requeue
from hotpot.ids import again
from hotpot.testing.records import (
    ENV_VERSION,
    make_fork,
    make_group,
    make_leases,
    make_row,
    make_trajectory,
)
from hotpot.types import VersionRow


def waiting(folder):
    return [one.quarantine_id for one in list_refused(open_run(folder)) if one.state == "waiting"]


def refuse_for_a_version(folder, trajectories):
    with open_store(folder) as store:
        store.record([make_row(VersionRow, kind="env", version="other@1+0")])
        store.ledger.lease(make_leases(trajectories))
        assert not store.append(trajectories).accepted
    return waiting(folder)


def explain(store):
    store.record([make_row(VersionRow, kind="env", version=ENV_VERSION)])


def test_once_the_cause_is_mended_records_are_accepted_once_as_new_attempts(tmp_path):
    folder = tmp_path / "run"
    group = make_group(size=3)
    ids = refuse_for_a_version(folder, group)
    with open_store(folder, resume=True) as store:
        report = requeue(store, ids[:1])  # still unknown
        ((old, new, reason),) = report.refused
        assert (old, reason) == (ids[0], "unknown_version")
        assert new not in ids
        explain(store)
        report = requeue(store, [*ids, new, *ids])
        assert [each for each, _ in report.accepted] == [ids[1], ids[2], new]
        assert report.skipped == ((ids[0], f"replaced: {new}"),)
        again_asked = requeue(store, [*ids, new])
        assert (again_asked.accepted, len(again_asked.skipped)) == ((), 4)
    assert not waiting(folder)
    found = {one.row.trajectory_id: one for one in read_trajectories(open_run(folder))}
    assert set(found) == {"0.0.0+1", "0.1.0+1", "0.2.0+1"}
    for before, name in zip(group, ["0.0.0+1", "0.1.0+1", "0.2.0+1"], strict=True):
        assert found[name].row.reward == before.row.reward
        for one, other in zip(found[name].steps, before.steps, strict=True):
            assert one.sampled_tokens.tolist() == other.sampled_tokens.tolist()
            assert one.behaviour_logprobs.tolist() == other.behaviour_logprobs.tolist()
    states = {one.quarantine_id: (one.state, one.became) for one in list_refused(open_run(folder))}
    assert states[ids[0]] == ("replaced", new)
    assert states[new] == ("requeued", "0.0.0+1")
    counted = (
        open_run(folder).sql("SELECT state, count(*) AS n FROM attempts GROUP BY 1 ORDER BY 1").to_pylist()
    )
    assert counted == [{"state": "dropped", "n": 3}, {"state": "finished", "n": 3}]


def test_an_attempt_comes_back_together_forks_and_all(tmp_path):
    folder = tmp_path / "run"
    parent = make_trajectory(num_steps=3)
    refuse_for_a_version(folder, [parent, make_fork(parent, 2), make_fork(parent, 1, number=2)])
    ids = {one.record_id: one.quarantine_id for one in list_refused(open_run(folder))}
    with open_store(folder, resume=True) as store:
        explain(store)
        report = requeue(store, [ids["0.0.0/2"]])
    assert {name for _, name in report.accepted} == {"0.0.0+1", "0.0.0+1/1", "0.0.0+1/2"}
    forks = [one.row for one in read_trajectories(open_run(folder)) if one.row.parent_trajectory_id]
    assert {row.parent_trajectory_id for row in forks} == {"0.0.0+1"}


def test_identical_records_have_their_own_ids_and_only_one_gets_in(tmp_path):
    folder = tmp_path / "run"
    with open_store(folder) as store:
        one = make_trajectory()
        store.ledger.lease(make_leases([one]))
        store.append([one, one, one])
    ids = waiting(folder)
    assert len(set(ids)) == 3
    with open_store(folder, resume=True) as store:
        report = requeue(store, ids)
    assert len(report.accepted) == 1
    assert len(report.skipped) == 2
    assert len(read_trajectories(open_run(folder))) == 1


def test_what_was_held_or_cannot_be_read_stays_readable_and_ids_must_be_known(tmp_path):
    folder = tmp_path / "run"
    gate = GateSection(breaker_min_records=2, breaker_share=0.1)
    good = [make_record(issue=issue) for issue in range(5)]
    with open_store(folder, gate=gate) as store:
        store.append_records([None, "x", {"row": 1}], producer="peer")
        assert {reason for _, reason in store.append_records(good, producer="peer").quarantined} == {
            "breaker_open"
        }
    with open_store(folder, resume=True, gate=NO_BREAKER) as store:
        held = [one.quarantine_id for one in list_refused(open_run(folder)) if one.reason == "breaker_open"]
        report = requeue(store, waiting(folder))
        assert [each for each, _ in report.accepted] == held
        assert [reason for *_, reason in report.refused] == ["malformed"] * 3
        with pytest.raises(UsageError, match="quarantine list"):
            requeue(store, ["nothing"])
    kept = [
        json.loads(text) for text in open_run(folder).table("quarantine", ["payload"])["payload"].to_pylist()
    ]
    assert kept[:3] == [None, "x", {"row": 1}]
    assert kept[3:8] == good


def test_refusals_of_the_first_version_come_back_upgraded(tmp_path):
    with zipfile.ZipFile(Path(__file__).parents[1] / "data" / "lakes" / "v1.zip") as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "closed"
    ids = waiting(folder)
    with open_store(folder, resume=True) as store:
        report = requeue(store, ids)
        # Their rewards were wrong then and are now: read, upgraded, judged, refused for what they are.
        assert [(old, reason) for old, _, reason in report.refused] == [(each, "rewards") for each in ids]
        mended = make_trajectory(issue=50)
        broken = dataclasses.replace(mended, row=dataclasses.replace(mended.row, reward=9.0))
        assert store.append_records([record_of(foreign(broken), 1)], producer="old").quarantined
    versions = open_run(folder).table("quarantine", ["payload_schema_version"]).to_pydict()
    assert versions["payload_schema_version"] == [1] * 7


def test_how_a_new_attempt_is_spelled():
    assert again("17.3.0", 1) == "17.3.0+1"
    assert again("17.3.0+1", 2) == "17.3.0+2"
    assert again("a+b", 1) == "a+b+1"


SECRETS = {
    "quoted": {"task_content": 'use password="hunter2xyz" now'},
    "named": {"password": "hunter2xyz"},
    "key": {"task_content": "-----BEGIN PRIVATE KEY-----\nhunter2xyz"},
}


def test_secrets_leave_a_payload_that_stays_json(tmp_path):
    with open_store(tmp_path / "run") as store:
        for secret in SECRETS.values():
            record = make_record()
            record["row"] |= {"reward": "bad", **secret}
            assert store.append_records([record], producer="peer").redactions == 1
        payloads = open_run(tmp_path / "run").table("quarantine", ["payload"])["payload"].to_pylist()
        assert not [text for text in payloads if "hunter2xyz" in text]
        assert [len(json.loads(text)["steps"]) for text in payloads] == [len(record["steps"])] * 3
        assert [reason for *_, reason in requeue(store, waiting(tmp_path / "run")).refused] == [
            "malformed"
        ] * 3


def test_a_payload_that_is_no_json_is_left_and_its_siblings_come_back(tmp_path):
    folder = tmp_path / "run"
    parent = make_trajectory(num_steps=3)
    refuse_for_a_version(folder, [parent])
    (row,) = from_table("quarantine", open_run(folder).table("quarantine"))
    with open_store(folder, resume=True) as store:
        explain(store)
        broken = dataclasses.replace(row, quarantine_id="ab", record_id="0.0.0/1", payload='{"row": [reda')
        store.record([broken])
        report = requeue(store, ["ab", row.quarantine_id])
    assert report.skipped == (("ab", "its payload is no JSON"),)
    assert report.accepted == ((row.quarantine_id, "0.0.0+1"),)


def test_a_name_that_is_no_text_is_refused_again(tmp_path):
    with open_store(tmp_path / "run") as store:
        record = make_record()
        record["row"]["trajectory_id"] = ["x"]
        store.append_records([record], producer="peer")
        assert [reason for *_, reason in requeue(store, waiting(tmp_path / "run")).refused] == ["malformed"]
