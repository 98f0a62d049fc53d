"""Generalised advantage estimation over action tokens (Schulman et al., arXiv:1506.02438), cut at pieces.

Owns the recursion and what stands at the end of a piece. Knows no model: values are given. Given tokens (prompts, tool
results) are no steps of it: from one action token the next is the action token that follows, however much lies between.

Per action token t with the value V(t) of the context before it and the reward r(t) it earned (a step's reward falls on
the step's last action token)::

    delta(t) = r(t) + gamma * V(t + 1) - V(t)            A(t) = delta(t) + gamma * lam * A(t + 1)

At the last action token of a piece V(t + 1) is the bootstrapped value: that of the next action token, in the piece it
belongs to (the earliest one that holds it); A(t + 1) is 0. At the end of the trajectory V(t + 1) is ``final_value``: 0
where the episode ended, a value of the last context where only a limit cut it.

Invariant: nothing but that one value crosses from a piece to another: neither a reward nor an advantage.

Three forms of the one recursion: :func:`token_gae` over whole trajectories, a step per action token; :func:`turn_gae`,
where a whole model call is one step (its value that of the context it began with, its reward the sum over its tokens, its
advantage that of each of its tokens: actions as utterances, arXiv:2402.19446), so that ``gamma`` and ``lam`` count calls
and not tokens; :func:`gae` for trajectories that were cut into pieces, each with values of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.errors import LearnerError
from hotpot.learner.estimators.scan import scan_back


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionValues:
    """Action tokens of whole trajectories, end to end.

    ``rewards``, ``values`` float64 ``[n]``: what each token earned, and V of the context before it. ``lengths`` int64
    ``[m]``: action tokens of each trajectory. ``final_values`` float64 ``[m]``: V behind its last one, 0 where the
    episode ended there.
    """

    rewards: NDArray[np.float64]
    values: NDArray[np.float64]
    lengths: NDArray[np.int64]
    final_values: NDArray[np.float64]

    def __post_init__(self) -> None:
        sizes = {len(self.rewards), len(self.values), int(self.lengths.sum())}
        if len(sizes) > 1 or len(self.lengths) != len(self.final_values):
            raise LearnerError(
                f"{len(self.rewards)} rewards and {len(self.values)} values for trajectories of {int(self.lengths.sum())} "
                f"action tokens, {len(self.final_values)} final values for {len(self.lengths)} trajectories; give one of "
                "each for every action token and trajectory"
            )

    @property
    def last(self) -> NDArray[np.bool_]:
        """Which tokens are the last of their trajectory, bool ``[n]``."""
        out = np.zeros(len(self.rewards), dtype=np.bool_)
        out[np.cumsum(self.lengths)[self.lengths > 0] - 1] = True
        return out

    @property
    def following(self) -> NDArray[np.float64]:
        """V(t + 1) of each token, float64 ``[n]``."""
        out = np.empty_like(self.values)
        out[:-1] = self.values[1:]
        out[np.cumsum(self.lengths)[self.lengths > 0] - 1] = self.final_values[self.lengths > 0]
        return out


def token_gae(actions: ActionValues, *, gamma: float, lam: float) -> NDArray[np.float64]:
    """Return the advantage of every action token, float64 ``[n]`` (arXiv:1506.02438, equation 16)."""
    delta = actions.rewards + gamma * actions.following - actions.values
    return scan_back(delta, np.where(actions.last, 0.0, gamma * lam))


def turn_gae(
    actions: ActionValues, calls: NDArray[np.int64], *, gamma: float, lam: float
) -> NDArray[np.float64]:
    """Return the advantage of every action token, float64 ``[n]``, the same for all tokens of one model call.

    ``calls`` int64 ``[n]``: the number of each token's step in its trajectory, the same for the tokens of one step.
    """
    if not len(calls):
        return np.zeros(0)
    owner = np.repeat(np.arange(len(actions.lengths)), actions.lengths)
    begins = np.flatnonzero(np.append(True, (calls[1:] != calls[:-1]) | (owner[1:] != owner[:-1])))
    whole = ActionValues(
        rewards=np.add.reduceat(actions.rewards, begins),
        values=actions.values[begins],
        lengths=np.bincount(owner[begins], minlength=len(actions.lengths)).astype(np.int64),
        final_values=actions.final_values,
    )
    return np.repeat(token_gae(whole, gamma=gamma, lam=lam), np.diff(np.append(begins, len(calls))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceValues:
    """Values one piece gives its action tokens, number ``first`` of the trajectory and those after it: float ``[k]``."""

    first: int
    values: NDArray[np.float64]

    @property
    def stop(self) -> int:
        """One past the number of its last action token."""
        return self.first + len(self.values)


def gae(
    rewards: NDArray[np.float64],
    pieces: Sequence[PieceValues],
    *,
    gamma: float,
    lam: float,
    final_value: float = 0.0,
) -> list[NDArray[np.float64]]:
    """Return each piece's advantage estimates, float64 ``[k]`` a piece, in the order of ``pieces``.

    ``rewards`` float ``[n]``, one per action token of the trajectory. Pieces may overlap; each action token then has an
    estimate of every piece that holds it. Returns (targets of a value function) are advantages plus values.

    Raises :class:`LearnerError` where an action token lies in no piece.
    """
    actions = piece_actions(rewards, pieces, final_value=final_value)
    return by_piece(token_gae(actions, gamma=gamma, lam=lam), actions)


def piece_actions(
    rewards: NDArray[np.float64], pieces: Sequence[PieceValues], *, final_value: float = 0.0
) -> ActionValues:
    """Return the pieces of one trajectory as if each were a trajectory that goes on behind its last action token, where its
    final value is the bootstrapped one; arguments and errors as of :func:`gae`."""
    ordered = sorted(pieces, key=lambda piece: piece.first)
    _check_cover(ordered, len(rewards))
    return ActionValues(
        rewards=np.concatenate([np.zeros(0), *(rewards[piece.first : piece.stop] for piece in pieces)]),
        values=np.concatenate([np.zeros(0), *(piece.values for piece in pieces)]),
        lengths=np.array([len(piece.values) for piece in pieces], dtype=np.int64),
        final_values=np.array(
            [_bootstrap(piece.stop, ordered, len(rewards), final_value) for piece in pieces], dtype=np.float64
        ),
    )


def by_piece(values: NDArray[np.float64], actions: ActionValues) -> list[NDArray[np.float64]]:
    """Return ``values`` float64 ``[n]`` of ``actions`` apart, float64 ``[k]`` for each of their trajectories."""
    return np.split(values, np.cumsum(actions.lengths)[:-1]) if len(actions.lengths) else []


def _bootstrap(number: int, ordered: Sequence[PieceValues], size: int, final_value: float) -> float:
    """Return the value of action token ``number`` in the earliest piece that holds it."""
    if number == size:
        return final_value
    owner = next(piece for piece in ordered if piece.first <= number < piece.stop)
    return float(owner.values[number - owner.first])


def _check_cover(ordered: Sequence[PieceValues], size: int) -> None:
    covered = 0
    for piece in ordered:
        if piece.first > covered:
            break
        covered = max(covered, piece.stop)
    if covered != size:
        raise LearnerError(
            f"{size} action tokens, but the pieces hold only the first {covered} without a gap; give every piece of the "
            "trajectory, and a reward for each action token"
        )
