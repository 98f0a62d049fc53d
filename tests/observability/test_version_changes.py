"""Changes inside a run: on synthetic runs whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest

from hotpot.observability.version_changes import GroupPoint, UpdateKl, find_changes

GROUPS = 8
NOISE = 0.25
RUNS = 60


def curve(random, num_updates: int, *, slope: float = 5.0) -> np.ndarray:
    """Rewards of the groups of a run that learns: an S-shaped rise under the noise of the tasks."""
    time = np.linspace(-1, 1, num_updates * GROUPS)
    return 1 / (1 + np.exp(-slope * time)) + random.normal(0, NOISE, len(time))


def points(rewards, changes: dict[str, list[int]]) -> list[GroupPoint]:
    """One point per group; a kind's version grows at each of its places, the policy's with every update."""

    def version(kind: str, place: int) -> str:
        return f"{kind}@{sum(place >= change for change in changes.get(kind, ()))}"

    return [
        GroupPoint(
            versions={
                "policy": str(1 + place // GROUPS),
                **{kind: version(kind, place) for kind in ("env", "reward", "prompt", "schema")},
            },
            reward=float(reward),
            num_trajectories=4,
            num_steps=10,
            update=1 + place // GROUPS,
            started_us=1_000 * place,
        )
        for place, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize("jump", [0.5, -0.5])
@pytest.mark.parametrize("kind", ["env", "reward", "prompt"])
@pytest.mark.slow
def test_a_planted_change_of_twice_the_noise_ranks_first_and_no_false_alarm_above_it(kind, jump) -> None:
    first, listed_publishes = 0, 0
    for seed in range(RUNS):
        random = np.random.default_rng(seed)
        rewards = curve(random, 64)
        planted = len(rewards) // 2
        rewards[planted:] += jump
        # What did nothing lies at least an update away: changes of one moment can't be told apart by anyone.
        elsewhere = [p for p in range(40, len(rewards) - 40) if abs(p - planted) >= GROUPS]
        changes = {
            other: sorted(random.choice(elsewhere, 2, replace=False).tolist())
            for other in ("env", "reward", "prompt")
        }
        changes[kind] = sorted({*changes[kind][:1], planted})
        found, _ = find_changes(points(rewards, changes), {})
        first += (found[0].kind, found[0].place) == (kind, planted)
        listed_publishes += sum(change.kind == "policy" for change in found)
        if (found[0].kind, found[0].place) == (kind, planted):
            assert found[0].jump.size == pytest.approx(jump, abs=0.4)
    assert first >= 0.95 * RUNS
    assert listed_publishes <= 0.1 * RUNS


def test_in_a_run_that_only_learns_all_publishes_are_one_line() -> None:
    listed = 0
    for seed in range(RUNS):
        found, folded = find_changes(points(curve(np.random.default_rng(seed), 48), {}), {})
        listed += bool(found)
        assert folded.count + len(found) == 47
    assert listed <= 0.08 * RUNS


def test_a_publish_that_ruins_the_policy_is_listed_once() -> None:
    random = np.random.default_rng(3)
    rewards = curve(random, 40)
    rewards[24 * GROUPS :] -= 0.9
    (change,), folded = find_changes(points(rewards, {}), {})
    assert (change.kind, change.old, change.new, change.update) == ("policy", "24", "25", 25)
    assert (folded.count, folded.first_version, folded.last_version) == (38, "1", "40")
    assert folded.largest_score < folded.threshold < change.score


def test_counts_kl_and_means_before_and_after() -> None:
    rewards = np.tile([0.2, 0.4], 32)
    rewards[32:] += 1
    kl = {u: UpdateKl(approx_kl=0.1 * u, reference_kl=None if u < 5 else 1.0) for u in range(1, 9)}
    (change,), _ = find_changes(points(rewards, {"env": [32]}), kl)
    assert (change.update, change.steps_before, change.place) == (5, 320, 32)
    assert (change.since_us, change.time_us) == (31_000, 32_000)
    assert (change.num_steps, change.num_trajectories) == ((320, 320), (128, 128))
    assert change.reward.before.mean == pytest.approx(0.3)
    assert change.reward.difference.mean == pytest.approx(1.0)
    assert change.reward.difference.low < 1.0 < change.reward.difference.high
    # The window reaches over 24 of the 64 groups on each side: updates 2 to 4, 5 to 7.
    assert change.approx_kl.before.mean == pytest.approx(0.3)
    assert change.approx_kl.difference.mean == pytest.approx(0.3)
    assert change.reference_kl.before is None
    assert change.reference_kl.after.mean == 1.0


def test_going_back_is_a_change_and_running_side_by_side_is_one() -> None:
    made = points(np.random.default_rng(0).normal(0, 1, 96), {})

    def under(version: str, places) -> None:
        for place in places:
            made[place] = replace(made[place], versions={**made[place].versions, "env": version})

    under("a", range(32))
    under("b", range(32, 56))
    under("a", range(56, 96))
    changes, _ = find_changes(made, {})
    steps = sorted((change.place, change.old, change.new, change.num_steps) for change in changes)
    assert steps == [(32, "a", "b", (320, 240)), (56, "b", "a", (240, 400))]
    under("a", range(40))
    under("b", [33, 35, *range(40, 96)])
    ((change,), _) = find_changes(made, {})
    assert (change.place, change.num_steps) == (33, (380, 580))


def test_what_changes_at_one_place_shares_its_jump_and_says_so() -> None:
    rewards = np.random.default_rng(0).normal(0, 0.1, 96)
    rewards[48:] += 1
    changes, folded = find_changes(points(rewards, {"env": [48], "reward": [48], "prompt": [70]}), {})
    assert [(change.kind, change.together) for change in changes] == [
        ("env", ("reward",)), ("reward", ("env",)), ("prompt", ()),
    ]  # fmt: skip
    assert changes[0].score == changes[1].score > 9
    assert folded.count == 11


def test_weights_taken_up_from_elsewhere_are_listed_whatever_they_did() -> None:
    changes, folded = find_changes(points(np.zeros(64), {}), {}, taken_up={"5"})
    assert [(change.kind, change.new) for change in changes] == [("policy", "5")]
    assert folded.count == 6


def test_runs_too_short_to_tell_have_changes_without_a_score() -> None:
    assert find_changes([], {}) == ([], None)
    (change,), _ = find_changes(points(np.array([0.0, 1.0]), {"env": [1]}), {})
    assert (change.jump, change.score) == (None, 0.0)
    assert change.reward.difference.low is None
