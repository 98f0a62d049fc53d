"""What each token of a training sequence earned, and whether its episode was cut off."""

import dataclasses

import numpy as np

from hotpot.experience import Cutting, cut_sequence, sequences
from hotpot.testing.records import make_trajectory
from hotpot.types import EndReason, Trajectory


def with_rewards(trajectory: Trajectory, rewards: list[float], *, total: float | None = None) -> Trajectory:
    steps = tuple(dataclasses.replace(s, reward=r) for s, r in zip(trajectory.steps, rewards, strict=True))
    row = dataclasses.replace(trajectory.row, reward=sum(rewards) if total is None else total)
    return Trajectory(row=row, steps=steps)


def test_a_steps_reward_is_on_its_last_sampled_token_in_whichever_segment() -> None:
    made = with_rewards(make_trajectory(num_steps=4, new_segment_at=2), [0.1, 0.0, -0.25, 1.0])
    found = sequences(made)
    assert len(found) == 2
    expected = [[0.1, 0.0], [-0.25, 1.0]]
    for sequence, rewards in zip(found, expected, strict=True):
        ends = np.flatnonzero(sequence.loss_mask & ~np.append(sequence.loss_mask[1:], False))
        assert sequence.rewards is not None
        assert sequence.rewards[ends].tolist() == rewards
        assert np.count_nonzero(np.delete(sequence.rewards, ends)) == 0


def test_a_step_that_sampled_nothing_gives_its_reward_to_the_one_before() -> None:
    made = make_trajectory(num_steps=3)
    none = np.zeros(0, np.int32)
    floats = np.zeros(0, np.float32)
    last = dataclasses.replace(
        made.steps[2], sampled_tokens=none, behaviour_logprobs=floats, model_logprobs=floats,
        span_policy_version=(), span_policy_length=(),
    )  # fmt: skip
    cut = with_rewards(dataclasses.replace(made, steps=(*made.steps[:2], last)), [0.0, 0.5, 1.0])
    [sequence] = sequences(cut)
    assert sequence.rewards is not None
    assert sequence.rewards[np.flatnonzero(sequence.loss_mask)[-1]] == 1.5


def test_rewards_that_are_not_those_of_the_steps_have_no_place() -> None:
    made = make_trajectory(num_steps=2)
    assert sequences(with_rewards(made, [0.0, 1.0], total=0.25))[0].rewards is None
    assert sequences(with_rewards(made, [0.1, 0.2], total=0.3))[0].rewards is not None


def test_what_a_limit_cut_is_marked() -> None:
    made = make_trajectory()
    for reason in EndReason:
        row = dataclasses.replace(made.row, end_reason=reason.value)
        assert sequences(dataclasses.replace(made, row=row))[0].truncated == (reason != EndReason.ANSWERED)


def test_pieces_keep_the_rewards_of_their_own_tokens() -> None:
    [whole] = sequences(with_rewards(make_trajectory(num_steps=12), [0.5] * 12))
    pieces = cut_sequence(whole, Cutting(segment_tokens=64, overlap=32))
    assert len(pieces) > 2
    assert sum(piece.rewards.sum() for piece in pieces if piece.rewards is not None) == 6.0
    assert all((piece.rewards[~piece.loss_mask] == 0).all() for piece in pieces if piece.rewards is not None)
