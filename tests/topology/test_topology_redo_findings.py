"""The pure parts of a doing over: the way to an update, what is wanted, and what a comparison comes to."""

import dataclasses
import itertools
import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotpot.errors import RunFolderError, UsageError
from hotpot.experience import RunReader
from hotpot.testing.records import make_row
from hotpot.topology.redo import compare_rows
from hotpot.topology.redo.findings import INPUTS, KERNELS, OUTCOMES, STEPS
from hotpot.topology.redo.terms import Terms
from hotpot.topology.redo.way import wanted_updates, way_to
from hotpot.topology.resume.rebuild import recorded_update
from hotpot.types import SCHEMA_VERSION, UpdateRow

LAKES = Path(__file__).parents[1] / "data" / "lakes"
TWO = {name: np.array([0.5, 0.25]) for name in STEPS}


def row(**values) -> UpdateRow:
    return make_row(UpdateRow, **(TWO | {"step_hashes": ("a", "b"), "loss": 0.5} | values))


@given(st.data())
def test_the_way_leads_along_parents_from_the_nearest_checkpoint(data) -> None:
    size = data.draw(st.integers(1, 12))
    parents = {n: data.draw(st.integers(0, n - 1)) for n in range(1, size + 1)}
    checkpoints = data.draw(st.sets(st.integers(0, size))) | {0}
    update = data.draw(st.integers(1, size))
    way = way_to(update, parents, checkpoints)
    steps = (way.start, *way.updates)
    assert steps[-1] == update
    assert way.start in checkpoints
    assert not checkpoints.intersection(way.updates[:-1])
    assert all(parents[child] == parent for parent, child in itertools.pairwise(steps))


def test_a_way_without_checkpoint_is_refused() -> None:
    with pytest.raises(RunFolderError, match=r"update 3 descends from update 0.*checkpoints kept: 3, 9"):
        way_to(3, {1: 0, 2: 1, 3: 2}, {3, 9})


def test_wanted_updates_are_those_recorded() -> None:
    recorded = [1, 2, 5, 9]
    assert wanted_updates("all", recorded) == recorded
    assert wanted_updates("2..6", recorded) == [2, 5]
    assert wanted_updates("9", recorded) == [9]
    for text in ("3", "3..4", "9..1", "", "1-2", "-1"):
        with pytest.raises(UsageError):
            wanted_updates(text, recorded)
    with pytest.raises(UsageError, match="none"):
        wanted_updates("all", [])


def test_equal_rows_are_identical_even_where_nothing_is_a_number() -> None:
    one = row(loss=math.nan, losses=np.array([math.nan, 1.0]))
    assert compare_rows(one, dataclasses.replace(one), starting=("w", "w")).verdict == "identical"


@pytest.mark.parametrize("name", [*INPUTS, *STEPS, *OUTCOMES, "skipped_at", "weights_checksum"])
def test_a_change_of_any_figure_is_found(name) -> None:
    old, new = row(), None
    value = getattr(old, name)
    if isinstance(value, np.ndarray):
        new = np.nextafter(value, 9.0)
    elif isinstance(value, float):
        new = np.nextafter(value, 9.0).item()
    else:
        new = {str: "other", tuple: ("a", "c"), int: 7, type(None): 7}[type(value)]
    found = compare_rows(old, dataclasses.replace(old, **{name: new}))
    assert found.verdict == "differs"
    assert {figure.name.partition("[")[0] for figure in found.differences} == {name}


def test_differences_come_in_the_order_they_arise() -> None:
    new = row(
        loss=0.75, losses=np.array([0.5, 0.75]), grad_norms=np.array([0.5, 1.0]), policy_losses=np.array([0.5]),
        weights_checksum="y", batch_hash="z",
    )  # fmt: skip
    found = compare_rows(row(), new, starting=("v", "w"))
    names = ["starting_weights", "batch_hash", "policy_losses[1]", "losses[1]", "grad_norms[1]", "loss"]
    assert [figure.name for figure in found.differences] == [*names, "weights_checksum"]
    assert found.differences[2].redone is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_rounding_is_taken_from_another_kind_of_machine_only(kernel) -> None:
    rounded = row(losses=TWO["losses"] * (1 + 1e-6), weights_checksum="other")
    assert compare_rows(row(), rounded).verdict == "differs"
    elsewhere = {kernel: 8 if kernel == "num_threads" else "another"}
    found = compare_rows(row(), dataclasses.replace(rounded, **elsewhere), starting=("v", "w"))
    assert (found.verdict, [figure.name for figure in found.other_kernels]) == ("close", [kernel])
    far = dataclasses.replace(rounded, **elsewhere, losses=TWO["losses"] * 1.01)
    assert compare_rows(row(), far).verdict == "differs"
    assert compare_rows(row(), dataclasses.replace(rounded, **elsewhere, batch_hash="b")).verdict == "differs"


def test_an_update_of_an_older_schema_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="update 4 was recorded under schema version 2"):
        Terms.of(make_row(UpdateRow, update=4, schema_version=2, learner_settings=""))
    with pytest.raises(UsageError, match="use the release that recorded it"):
        Terms.of(make_row(UpdateRow, update=4, learner_settings='{"unheard": 1}'))
    with pytest.raises(UsageError, match="does not read"):
        Terms.of(make_row(UpdateRow, update=4, learner_settings="no JSON"))


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> UpdateRow:
    """An update as a lake of schema version 3 holds it."""
    folder = tmp_path_factory.mktemp("lake")
    with zipfile.ZipFile(LAKES / "v3.zip") as archive:
        archive.extractall(folder)
    return recorded_update(RunReader.open(folder / "closed"), 1)


def test_what_schema_version_3_did_not_keep_can_not_differ(third) -> None:
    """A critic's own step was learned, and told nowhere; every figure that was told is compared all the same."""
    state = {"pass_limit": 4, "norms": [0.25]}
    kept = {"step_hashes": ("a", "b"), "losses": TWO["losses"], "learner_state": json.dumps(state)}
    later = {
        "schema_version": SCHEMA_VERSION, "step_hashes": ("a", "b", "critic alone"), "critic_steps": 1,
        "critic_learning_rate": 0.5, "entropy_loss": 0.5, "entropy_losses": TWO["losses"], "critic_losses": np.ones(1),
        "critic_grad_norms": np.ones(3), "learner_state": json.dumps(state | {"critic_norms": [2.0]}),
    }  # fmt: skip
    recorded = dataclasses.replace(third, **kept)
    assert (recorded.schema_version, recorded.critic_steps, recorded.critic_learning_rate) == (3, 0, None)
    redone = dataclasses.replace(recorded, **later)
    recorded = dataclasses.replace(
        recorded, learner_state=json.dumps(state, sort_keys=True, separators=(",", ":"))
    )
    assert compare_rows(recorded, redone).differences == ()
    for name, value in {
        "losses": TWO["losses"] * 2, "loss": 9.0, "step_hashes": ("a", "c", "critic alone"), "kl_loss": 9.0,
        "learner_state": json.dumps(state | {"pass_limit": 2}),
    }.items():  # fmt: skip
        found = compare_rows(recorded, dataclasses.replace(redone, **{name: value}))
        assert {figure.name.partition("[")[0] for figure in found.differences} == {name}
    now = dataclasses.replace(recorded, schema_version=SCHEMA_VERSION)
    told = {figure.name.partition("[")[0] for figure in compare_rows(now, redone).differences}
    assert told == set(later) - {"schema_version"}
