"""Changes inside a run as its tables tell them: rows in, changes out."""

import json

import pytest

from hotpot.errors import UsageError
from hotpot.observability.run_changes import around, run_changes
from hotpot.testing.records import make_group, make_row
from hotpot.types import EventRow, GroupRow, UpdateRow, VersionRow

UPDATES, GROUPS = 12, 4


def policy(version: int, checksum: str, update: int, origin: str = "run") -> VersionRow:
    manifest = json.dumps({"checksum": checksum, "update": update, "origin": origin})
    return make_row(VersionRow, kind="policy", version=str(version), manifest=manifest, sources="{}")


@pytest.fixture
def reader(reader_over):
    """A run of twelve updates: at update 7 it went back to the weights of update 3, at update 10 on with its own."""
    issues = range(UPDATES * GROUPS)
    made = [
        t for issue in issues for t in make_group(issue=issue, size=2, policy_version=1 + issue // GROUPS)
    ]
    served = [policy(1, "c0", 0, "models/start")]
    served += [policy(version, f"c{version}", version - 1) for version in range(2, UPDATES + 1)]
    served[6] = policy(7, "c4", 3, "runs/run/checkpoints/update-000003")
    served[9] = policy(10, "c9", 9, "runs/run/checkpoints/update-000009")
    resumed = {"changed": {"learner.learning_rate": [1e-4, 1e-5]}}
    return reader_over(
        {
            "trajectories": [t.row for t in made],
            "steps": [step for t in made for step in t.steps],
            "groups": [
                make_row(GroupRow, group_id=f"g{issue}", update=1 + issue // GROUPS) for issue in issues
            ],
            "updates": [
                make_row(
                    UpdateRow,
                    update=u,
                    approx_kl=0.1 * u,
                    optimizer_steps=int(u != 5),
                    new_policy_version=u + 1,
                )
                for u in range(1, UPDATES + 1)
            ],
            "versions": served,
            "events": [
                make_row(
                    EventRow, kind="resumed", detail=json.dumps(resumed), time_us=made[48].row.started_us
                )
            ],
        }
    )


def test_going_back_to_older_weights_is_a_change_with_the_settings_of_that_resume(reader) -> None:
    found = run_changes(reader)
    (explained,) = found.changes
    change = explained.change
    assert (change.kind, change.old, change.new, change.update, change.place) == ("policy", "6", "7", 7, 24)
    assert {difference.where for difference in explained.differences} == {
        "version", "checksum", "origin", "update", "learner.learning_rate",
    }  # fmt: skip
    assert found.publishes.count == UPDATES - 2
    # Update 5 took no step: it has no KL.
    assert change.approx_kl.before.count == 5


def test_around_an_update(reader) -> None:
    near = around(reader, 6, radius=1)
    assert [(point.update, point.changes) for point in near.curve] == [(5, ()), (6, ()), (7, (1,))]
    assert near.curve[0].approx_kl is None
    assert near.curve[1].reward.mean == 0.5
    assert near.curve[1].reward.count == GROUPS
    assert [one.change.new for one in near.changes] == ["7"]
    with pytest.raises(UsageError, match="no update 13; it has 1 to 12"):
        around(reader, 13)
