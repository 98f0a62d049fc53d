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
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.errors import LearnerError


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
    ordered = sorted(pieces, key=lambda piece: piece.first)
    _check_cover(ordered, len(rewards))
    widest = max((len(piece.values) for piece in pieces), default=0)
    values = np.zeros((len(pieces), widest))
    earned = np.zeros((len(pieces), widest))
    following = np.zeros((len(pieces), widest))
    inside = np.zeros((len(pieces), widest), dtype=bool)
    for row, piece in enumerate(pieces):
        size = len(piece.values)
        if not size:
            continue
        values[row, :size] = piece.values
        earned[row, :size] = rewards[piece.first : piece.stop]
        following[row, : size - 1] = piece.values[1:]
        following[row, size - 1] = _bootstrap(piece.stop, ordered, len(rewards), final_value)
        inside[row, :size] = True
    delta = np.where(inside, earned + gamma * following - values, 0.0)
    out = np.zeros_like(delta)
    carried = np.zeros(len(pieces))
    for column in range(widest - 1, -1, -1):
        carried = delta[:, column] + gamma * lam * carried
        out[:, column] = carried
    return [out[row, : len(piece.values)].copy() for row, piece in enumerate(pieces)]


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
