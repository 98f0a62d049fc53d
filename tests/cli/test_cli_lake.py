"""``hotpot lake``: what its commands say and refuse; what they do is tested beside the code that does it."""

import pytest

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore
from hotpot.testing.records import make_group, make_leases


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "kept"
    with ExperienceStore.open(folder, run_id="kept", settings=StoreSection(), vocabulary_size=64) as store:
        group = make_group(run_id="kept", size=2)
        store.ledger.lease(make_leases(group))
        store.append(group)
    return folder


def test_a_deleted_trajectory_is_said_to_be_deleted_wherever_it_is_asked_for(hotpot, run):
    assert hotpot("lake", "delete", run, "0.0.0", "--reason", "a person asked").exit_code == 0
    for command in (("show", run, "0.0.0"), ("lineage", run, "--trajectory", "0.0.0")):
        asked = hotpot(*command)
        assert asked.exit_code == 2
        assert "was deleted at" in asked.stderr
        assert "a person asked" in asked.stderr
    assert "nearest: 0.1.0" in hotpot("show", run, "0.0.1").stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--copy", "c", "--out", "x.json"), "exclude each other"),
        (("--out", "nowhere/x.json"), "there is no folder nowhere"),
    ],
)
def test_an_export_that_cannot_be_meant_is_refused(hotpot, run, options, words):
    refused = hotpot("lake", "export", run, *options)
    assert (refused.exit_code, words in refused.stderr) == (2, True)


def test_commands_give_json_and_a_sound_run_verifies(hotpot, run):
    for command in ("compact", "vacuum", "verify", "sizes", "export"):
        assert hotpot("lake", command, run, "--json").exit_code == 0
    assert hotpot("lake", "verify", run).stdout.startswith("sound")
