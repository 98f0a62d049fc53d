"""``hotpot lake quarantine``, and every reading command on runs of older schema versions."""

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest
from small_runs import json_of

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore
from hotpot.testing.records import ENV_VERSION, make_group, make_leases, make_row, make_trajectory
from hotpot.types import VersionRow

LAKES = sorted((Path(__file__).parents[1] / "data" / "lakes").glob("v*.zip"))


@pytest.fixture
def refusing(tmp_path):
    """A run at rest with three records of an unexplained version and one whose rewards don't add up."""
    folder = tmp_path / "runs" / "refusing"
    store = ExperienceStore.open(folder, run_id="refusing", settings=StoreSection(), vocabulary_size=64)
    with store:
        broken = make_trajectory(run_id="refusing", issue=9, actor_id="actor-7")
        broken = dataclasses.replace(broken, row=dataclasses.replace(broken.row, reward=7.0))
        store.ledger.lease(make_leases([broken]))
        store.append([broken])
        store.record([make_row(VersionRow, run_id="refusing", kind="env", version="other@1+0")])
        group = make_group(run_id="refusing", size=3)
        store.ledger.lease(make_leases(group))
        store.append(group)
    return folder


def test_list_counts_by_reason_and_producer(hotpot, refusing):
    found = json_of(hotpot("lake", "quarantine", "list", refusing, "--json"))
    assert [(row["reason"], row["producer"], row["records"], row["waiting"]) for row in found] == [
        ("unknown_version", "actor-0", 3, 3),
        ("rewards", "actor-7", 1, 1),
    ]
    (one,) = json_of(
        hotpot("lake", "quarantine", "list", refusing, "--records", "--producer", "actor-7", "--json")
    )
    assert (one["record_id"], one["state"]) == ("9.0.0", "waiting")
    assert "unknown_version" in hotpot("lake", "quarantine", "list", refusing).stdout
    typo = hotpot("lake", "quarantine", "list", refusing, "--reason", "times")
    assert (typo.exit_code, "there is rewards, unknown_version" in typo.stderr) == (2, True)


def test_show_gives_the_whole_payload(hotpot, refusing):
    (row,) = json_of(hotpot("lake", "quarantine", "list", refusing, "--reason", "rewards", "--json"))
    shown = json_of(hotpot("lake", "quarantine", "show", refusing, row["example"], "--json"))
    assert shown["payload"]["row"]["reward"] == 7.0
    assert len(shown["payload"]["steps"]) == 2
    text = hotpot("lake", "quarantine", "show", refusing, row["example"]).stdout
    assert "is not the finite sum" in text
    assert json.loads(text[text.index("payload\n") + 8 :]) == shown["payload"]
    missing = hotpot("lake", "quarantine", "show", refusing, "nothing")
    assert (missing.exit_code, "--records" in missing.stderr) == (2, True)


def test_requeue_accepts_what_was_mended_and_says_what_was_not(hotpot, refusing):
    with ExperienceStore.open(
        refusing, run_id="refusing", settings=StoreSection(), vocabulary_size=64, resume=True
    ) as store:
        store.record([make_row(VersionRow, run_id="refusing", kind="env", version=ENV_VERSION)])
        busy = hotpot("lake", "quarantine", "requeue", refusing, "--reason", "rewards")
        assert (busy.exit_code, "is being written by" in busy.stderr) == (2, True)
    done = json_of(hotpot("lake", "quarantine", "requeue", refusing, "--reason", "unknown_version", "--json"))
    assert [name for _, name in done["accepted"]] == ["0.0.0+1", "0.1.0+1", "0.2.0+1"]
    again = hotpot("lake", "quarantine", "requeue", refusing, done["accepted"][0][0])
    assert (again.exit_code, "left alone, requeued: 0.0.0+1" in again.stdout) == (0, True)
    assert (
        hotpot("lake", "quarantine", "requeue", refusing, "--reason", "unknown_version").stdout
        == "nothing waits\n"
    )
    refused = hotpot("lake", "quarantine", "requeue", refusing, "--reason", "rewards")
    assert (refused.exit_code, "refused again (rewards)" in refused.stdout) == (1, True)
    counts = json_of(hotpot("lake", "quarantine", "list", refusing, "--reason", "rewards", "--json"))
    assert [(row["waiting"], row["replaced"]) for row in counts] == [(1, 1)]
    assert hotpot("lake", "quarantine", "requeue", refusing).exit_code == 2
    share = json_of(hotpot("sql", refusing, "--metric", "gate/refused_share", "--by", "producer", "--json"))
    assert {row["producer"]: row["value"] for row in share} == {"actor-0": 0.5, "actor-7": 1.0}


@pytest.mark.parametrize("name", ["closed", "killed"])
@pytest.mark.parametrize("lake", LAKES, ids=lambda lake: lake.stem)
def test_every_reading_command_opens_runs_of_every_version(hotpot, tmp_path, lake, name):
    with zipfile.ZipFile(lake) as archive:
        archive.extractall(tmp_path / "runs")
    rows = json.loads((tmp_path / "runs" / "expected.json").read_text())[name]["rows"]
    place = ("--runs", tmp_path / "runs", "--json")
    listed = {row["run"]: row for row in json_of(hotpot("runs", *place))}
    assert listed[name]["trajectories"] == rows["trajectories"]
    (count,) = json_of(hotpot("sql", name, "SELECT count(weight) AS n FROM consumptions", *place))
    assert count["n"] == rows["consumptions"]
    (first, *_) = json_of(hotpot("sql", name, "SELECT trajectory_id FROM trajectories", *place))
    json_of(hotpot("show", name, first["trajectory_id"], *place))
    json_of(hotpot("lineage", name, *place))
    refused = json_of(hotpot("lake", "quarantine", "list", name, *place))
    assert sum(row["records"] for row in refused) == rows["quarantine"]
    missing = hotpot(
        "lake", "quarantine", "requeue", name, "--reason", "rewards", "--runs", tmp_path / "runs"
    )
    if lake.stem == "v1":
        assert (missing.exit_code, "--vocabulary" in missing.stderr) == (2, True)
