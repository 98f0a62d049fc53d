import dataclasses
import json
from typing import Any

import pytest

from hotpot.cli.words import chain_lines
from hotpot.errors import UsageError
from hotpot.observability.changes import Difference, against, manifest_differences
from hotpot.observability.lineage import Discarding, trajectory_lineage, version_uses
from hotpot.testing.records import make_fork, make_row, make_trajectory
from hotpot.types import (
    ConsumptionRow,
    DiscardRow,
    LearnedTokensRow,
    Purpose,
    Trajectory,
    UpdateRow,
    VersionRow,
)


def with_env(made: Trajectory, version: str) -> Trajectory:
    return dataclasses.replace(
        made,
        row=dataclasses.replace(made.row, env_version=version),
        steps=tuple(dataclasses.replace(step, env_version=version) for step in made.steps),
    )


def tables(made: list[Trajectory], **more: Any) -> dict[str, Any]:
    return {"trajectories": [t.row for t in made], "steps": [s for t in made for s in t.steps], **more}


def test_versions_with_their_updates_and_rewards_before_and_after(reader_over) -> None:
    made = [
        with_env(
            make_trajectory(issue=issue, reward=float(issue >= 4), policy_version=1 + issue // 2),
            "e@1+a" if issue < 4 else "e@2+b",
        )
        for issue in range(6)
    ]
    held_out = make_trajectory(issue=9, purpose=Purpose.EVALUATION, policy_version=4)
    used = [
        make_row(ConsumptionRow, trajectory_id=t.row.trajectory_id, update=1 + number // 2)
        for number, t in enumerate(made)
    ]
    uses = version_uses(reader_over(tables([*made, with_env(held_out, "e@2+b")], consumptions=used)))
    env = [use for use in uses if use.kind == "env"]
    assert [(u.version, u.num_trajectories, u.num_steps, u.first_update, u.last_update) for u in env] == [
        ("e@1+a", 4, 8, 1, 2), ("e@2+b", 3, 6, 3, 3),
    ]  # fmt: skip
    assert [(u.reward_before, u.reward_mean) for u in env] == [(None, 0.0), (0.0, 1.0)]
    policy = [use for use in uses if use.kind == "policy"]
    assert [(u.version, u.first_update) for u in policy] == [("1", 1), ("2", 2), ("3", 3), ("4", None)]
    assert policy[3].reward_mean is None
    assert {use.kind for use in uses} == {"env", "reward", "prompt", "policy", "schema"}


def test_the_chain_of_one_trajectory(reader_over) -> None:
    made = make_trajectory(policy_version=2)
    last = made.steps[1]
    half = len(last.sampled_tokens) // 2
    swapped = dataclasses.replace(
        last, span_policy_version=(2, 3), span_policy_length=(half, len(last.sampled_tokens) - half)
    )
    made = dataclasses.replace(made, steps=(made.steps[0], swapped))
    reader = reader_over(
        tables(
            [made],
            updates=[
                make_row(UpdateRow, update=1, policy_version=1, new_policy_version=2),
                make_row(UpdateRow, update=2, policy_version=2, new_policy_version=3),
            ],
            consumptions=[
                make_row(ConsumptionRow, trajectory_id="0.0.0", update=2, epochs=3, source="fresh")
            ],
            learned_tokens=[
                make_row(LearnedTokensRow, trajectory_id="0.0.0", update=2, loss_mask=made_mask())
            ],
        )
    )
    found = trajectory_lineage(reader, "0.0.0")
    assert [(p.policy_version, p.made_by_update) for p in found.policies] == [(2, 1), (3, 2)]
    assert found.policies[0].checksum == made.steps[0].policy_checksum
    assert found.policies[1].num_tokens == len(last.sampled_tokens) - half
    (used,) = found.consumptions
    assert (used.update, used.epochs, used.new_policy_version, used.num_loss_tokens) == (2, 3, 3, 2)
    assert found.discarded is None
    with pytest.raises(UsageError, match=r"nearest: 0\.0\.0"):
        trajectory_lineage(reader, "0.0.9")


def test_a_discarded_trajectory_says_why(reader_over) -> None:
    row = make_row(DiscardRow, trajectory_id="0.0.0", reason="stale", update=7, staleness=9)
    found = trajectory_lineage(reader_over(tables([make_trajectory()], discards=[row])), "0.0.0")
    assert found.discarded == Discarding(reason="stale", update=7, staleness=9)
    (line,) = [text for text, _ in chain_lines(found, "run", {1: None}) if "discarded" in text]
    assert line == "it was discarded during update 7 (stale, 9 policy versions behind)"


def test_the_family_of_a_fork_from_its_root(reader_over) -> None:
    root = make_trajectory(num_steps=3)
    one, two = make_fork(root, 1, number=1), make_fork(root, 2, number=2, reward=0.0)
    nested = make_fork(two, 0, number=1)
    used = [make_row(ConsumptionRow, trajectory_id="0.0.0/2", update=update) for update in (3, 1)]
    reader = reader_over(tables([nested, two, root, one, make_trajectory(issue=1)], consumptions=used))
    expected = [("0.0.0", None, 0), ("0.0.0/1", 1, 1), ("0.0.0/2", 2, 1), ("0.0.0/2/1", 0, 2)]
    for member in (root, one, two, nested):
        found = trajectory_lineage(reader, member.row.trajectory_id)
        assert [(one.trajectory_id, one.fork_step, one.depth) for one in found.family] == expected
        assert (found.parent_trajectory_id, found.fork_step) == (
            member.row.parent_trajectory_id,
            member.row.fork_step,
        )
    assert [one.updates for one in found.family] == [(), (), (1, 3), ()]
    assert trajectory_lineage(reader, "1.0.0").family == ()
    orphan = trajectory_lineage(reader_over(tables([nested])), "0.0.0/2/1").family
    assert [(one.trajectory_id, one.parent_trajectory_id, one.depth) for one in orphan] == [
        ("0.0.0/2/1", "0.0.0/2", 0)
    ]


def made_mask() -> Any:
    import numpy as np

    return np.asarray([0, 1, 1, 0], dtype=np.int32)


def version(kind: str, fingerprint: str, **parts: Any) -> VersionRow:
    manifest = {
        "name": kind, "declared": "1", "files": {}, "params": {}, "runs_on": {}, "perturbation": "none", "unverifiable": [],
    }  # fmt: skip
    sources = parts.pop("sources", {})
    manifest |= parts
    manifest["files"] = {name: f"{hash(text):x}" for name, text in sources.items()} | manifest["files"]
    return make_row(
        VersionRow, kind=kind, version=f"{kind}@1+{fingerprint}", manifest=json.dumps(manifest), sources=json.dumps(sources)
    )  # fmt: skip


TOOL = "\n".join(f"line {number}" for number in range(1, 61))


def differences(reader_over, old: list[VersionRow], new: list[VersionRow]) -> list[str]:
    readers = [reader_over({"versions": found}) for found in (old, new)]
    return [str(found) for found in against(*readers, old_manifest={}, new_manifest={})]


def test_one_changed_line_is_named_with_its_file_and_number(reader_over) -> None:
    old = version("env", "a", sources={"order_desk/tools.py": TOOL, "order_desk/items.csv": "a,1\nb,2\n"})
    changed = TOOL.replace("line 41", "line forty-one")
    new = version("env", "b", sources={"order_desk/tools.py": changed, "order_desk/items.csv": "a,1\nb,3\n"})
    assert differences(reader_over, [old], [new]) == [
        "env: order_desk/items.csv line 2: - b,2 + b,3",
        "env: order_desk/tools.py line 41: - line 41 + line forty-one",
    ]


def test_every_hunk_is_its_own_difference_and_pure_additions_count(reader_over) -> None:
    old = version("reward", "a", sources={"r.py": TOOL})
    text = TOOL.replace("line 3\n", "").replace("line 50\n", "line 50\nmore\n")
    assert differences(reader_over, [old], [version("reward", "b", sources={"r.py": text})]) == [
        "reward: r.py line 3: - line 3 + (nothing)",
        "reward: r.py line 51: - (nothing) + more",
    ]


def test_prompt_parameters_packages_and_binary_files(reader_over) -> None:
    old = [
        version(
            "prompt",
            "a",
            sources={"system_prompt": "You are a clerk."},
            files={"tokenizer/tokenizer.json": "1" * 64},
        ),
        version("env", "a", params={"noise": 0.1}, runs_on={"sqlite3": "3.1"}),
    ]
    new = [
        version("prompt", "b", sources={"system_prompt": "You are a careful clerk."}, files={"tokenizer/tokenizer.json": "2" * 64}),
        version("env", "b", params={"noise": 0.2}, runs_on={"sqlite3": "3.2"}),
    ]  # fmt: skip
    assert differences(reader_over, old, new) == [
        "env: param noise: - 0.1 + 0.2",
        "env: package sqlite3: - 3.1 + 3.2",
        "prompt: system_prompt line 1: - You are a clerk. + You are a careful clerk.",
        "prompt: file tokenizer/tokenizer.json: - sha256 111111111111 + sha256 222222222222",
    ]


def test_equal_runs_differ_in_nothing(reader_over) -> None:
    rows = [version("env", "a", sources={"t.py": TOOL}), version("prompt", "a")]
    assert differences(reader_over, rows, rows) == []


def test_a_version_that_was_taken_up_again_names_its_update_and_folder(reader_over) -> None:
    trajectory = make_trajectory(policy_version=5)
    again = make_row(
        VersionRow, kind="policy", version="5", manifest=json.dumps({"checksum": "c", "update": 3, "origin": "runs/r/u3"})
    )  # fmt: skip
    reader = reader_over(tables([trajectory]) | {"versions": [again]})
    (policy,) = trajectory_lineage(reader, trajectory.row.trajectory_id).policies
    assert (policy.policy_version, policy.made_by_update, policy.origin) == (5, 3, "runs/r/u3")
    first = make_row(
        VersionRow,
        kind="policy",
        version="5",
        manifest=json.dumps({"checksum": "c", "update": 0, "origin": "m"}),
    )
    reader = reader_over(tables([trajectory]) | {"versions": [first]})
    (policy,) = trajectory_lineage(reader, trajectory.row.trajectory_id).policies
    assert (policy.made_by_update, policy.origin) == (None, "m")


def test_other_starting_weights_are_named(reader_over) -> None:
    old = make_trajectory(policy_version=1)
    new = dataclasses.replace(
        old, steps=tuple(dataclasses.replace(step, policy_checksum="f" * 32) for step in old.steps)
    )
    (found,) = against(
        reader_over(tables([old])), reader_over(tables([new])), old_manifest={}, new_manifest={}
    )
    assert (found.part, found.new) == ("policy", "f" * 32)


def test_settings_packages_and_code_of_the_manifests() -> None:
    old = {
        "recipe": {"run": {"id": "a", "seed": 1}, "learner": {"learning_rate": 1e-4}},
        "packages": {"torch": "2.13.0", "numpy": "2"},
        "commit": "abc",
        "diff_hash": "",
        "num_threads": 1,
        "run_id": "a",
        "thread_variables": {"OMP_NUM_THREADS": "1"},
    }
    new = {
        "recipe": {"run": {"id": "b", "seed": 1}, "learner": {"learning_rate": 2e-4}},
        "packages": {"torch": "2.14.0", "numpy": "2", "rich": "15"},
        "commit": "def",
        "diff_hash": "",
        "num_threads": 2,
        "run_id": "b",
        "thread_variables": {},
    }
    assert list(manifest_differences(old, new)) == [
        Difference(part="recipe", where="learner.learning_rate", old="0.0001", new="0.0002"),
        Difference(part="packages", where="rich", old="", new="15"),
        Difference(part="packages", where="torch", old="2.13.0", new="2.14.0"),
        Difference(part="code", where="commit", old="abc", new="def"),
        Difference(part="machine", where="num_threads", old="1", new="2"),
        Difference(part="machine", where="thread_variables.OMP_NUM_THREADS", old="1", new=""),
    ]
    as_text = {**old, "recipe": json.dumps(old["recipe"])}
    assert list(manifest_differences(old, as_text)) == []
