"""Advantages and returns of a batch's pieces from the values of their states: where a critic meets the recursion.

Owns which states need a value, what each action token earned, and the two levels. Knows no model: values are given.

``token``  each action token is a decision, as :mod:`hotpot.learner.estimators.gae` has it
``step``   each step is one (a model call: a run of action tokens; often called turn level): its state is that of its
           first token, its reward their sum, and all its tokens have the same advantage and the same return

V-trace takes action tokens, each by the ratio of the policy the update starts from to the one that sampled it.

Rewards: what a step earned falls on its last action token; where the record has no rewards by step that sum to the
trajectory's, all of it falls on the trajectory's last. An episode that ended is worth nothing afterwards; one that only
a limit cut is worth the value of its last context.

Invariants: a trajectory's pieces are numbered through all its segments; nothing depends on the order they are given in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.learner.estimators.gae import ActionValues, PieceValues, by_piece, piece_actions, token_gae
from hotpot.learner.estimators.merging import action_places, places_within
from hotpot.learner.estimators.vtrace import vtrace

_FREE: Mapping[tuple[str, int], NDArray[np.float64]] = {}

Level = Literal["token", "step"]
PieceKey = tuple[str, int, int]
"""Trajectory id, segment and begin: what tells a piece from any other of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceStates:
    """The states of one piece that need a value: those before its action tokens at ``places`` int64 ``[k]``.

    ``decisions`` int64 ``[k]``: the decision each of them belongs to, numbered through the trajectory. ``final``: the
    state behind the piece's last token too, because a limit cut the episode there.
    """

    piece: TrainingSequence
    places: NDArray[np.int64]
    decisions: NDArray[np.int64]
    final: bool

    @property
    def num_values(self) -> int:
        """Values it needs."""
        return len(self.places) + self.final

    @property
    def key(self) -> PieceKey:
        """What tells the piece from any other."""
        return piece_key(self.piece)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceEstimates:
    """Advantage, return and value of each action token of a piece, context too, float64 ``[k]``."""

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """What V-trace needs beside values: ``log_ratios`` float64 ``[k]`` a piece, log pi(start) - log mu of each of its action
    tokens, context too; the bounds of the ratio (IMPALA, arXiv:1802.01561, equation 1)."""

    log_ratios: Sequence[NDArray[np.float64]]
    rho_bar: float
    c_bar: float

    def corrected(
        self, actions: ActionValues, pieces: Sequence[int], *, gamma: float, lam: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return targets and advantages float64 ``[n]`` of ``actions``, the tokens of the ``pieces`` of those numbers."""
        ratios = np.concatenate([self.log_ratios[number] for number in pieces])
        found = vtrace(actions, ratios, gamma=gamma, lam=lam, rho_bar=self.rho_bar, c_bar=self.c_bar)
        return found.targets, found.advantages


def piece_key(piece: TrainingSequence) -> PieceKey:
    """Return what tells ``piece`` from any other of a batch."""
    return piece.trajectory_id, piece.segment, piece.begin


def piece_states(pieces: Sequence[TrainingSequence], level: Level) -> list[PieceStates]:
    """Return the states of ``pieces``, which are all those of their trajectories, trajectory by trajectory."""
    found: list[PieceStates] = []
    for _, mine in groupby(sorted(pieces, key=piece_key), key=lambda piece: piece.trajectory_id):
        own = list(mine)
        before = 0
        for _, same in groupby(own, key=lambda piece: piece.segment):
            segment = list(same)
            places = action_places(segment)
            numbers = before + _decisions(places, level)
            before += len(np.unique(numbers))
            for piece in segment:
                held = places_within(piece, places)
                found.append(
                    PieceStates(
                        piece=piece,
                        places=places[held] - piece.begin,
                        decisions=numbers[held],
                        final=piece.truncated and piece is own[-1],
                    )
                )
    return found


def estimate(
    states: Sequence[PieceStates],
    values: Sequence[NDArray[np.float64]],
    *,
    discount: float,
    gae_lambda: float,
    costs: Mapping[tuple[str, int], NDArray[np.float64]] = _FREE,
    trace: Trace | None = None,
) -> dict[PieceKey, PieceEstimates]:
    """Return the estimates of every piece by its key: generalised advantages, or with a ``trace`` V-trace's, whose states
    are those of tokens.

    ``states`` as :func:`piece_states` returns them; ``values`` float ``[num_values]`` a piece, the final state's last.
    ``costs`` by (trajectory id, segment), float64 ``[k]``: what is taken off the reward of each action token of the
    segment, as a KL in the reward is (RLHF, arXiv:2203.02155, equation 2).
    """
    found: dict[PieceKey, PieceEstimates] = {}
    for _, mine in groupby(range(len(states)), key=lambda number: states[number].piece.trajectory_id):
        own = list(mine)
        last, last_values = states[own[-1]], values[own[-1]]
        heard = [values[number][: len(states[number].places)] for number in own]
        of_piece = [_of_decision(states[number], value) for number, value in zip(own, heard, strict=True)]
        actions = piece_actions(
            _decision_rewards([states[number] for number in own], costs),
            [piece for piece, _ in of_piece],
            final_value=float(last_values[-1]) if last.final else 0.0,
        )
        if trace is None:
            advantages = token_gae(actions, gamma=discount, lam=gae_lambda)
            targets = advantages + actions.values
        else:
            targets, advantages = trace.corrected(actions, own, gamma=discount, lam=gae_lambda)
        gains, returns = by_piece(advantages, actions), by_piece(targets, actions)
        for place, number in enumerate(own):
            which = of_piece[place][1]
            found[states[number].key] = PieceEstimates(
                advantages=gains[place][which], returns=returns[place][which], values=heard[place]
            )
    return found


def token_rewards(pieces: Sequence[TrainingSequence]) -> NDArray[np.float64]:
    """Return what each action token of a trajectory earned, float64 ``[n]``, from all its pieces in order."""
    size = sum(int(piece.loss_mask.sum()) for piece in pieces)
    if size and all(piece.rewards is not None for piece in pieces):
        return np.concatenate([p.rewards[p.loss_mask] for p in pieces if p.rewards is not None])
    earned = np.zeros(size)
    earned[-1:] = pieces[-1].reward
    return earned


def _of_decision(state: PieceStates, values: NDArray[np.float64]) -> tuple[PieceValues, NDArray[np.int64]]:
    """Return the decisions that ``state`` holds, each with the value of its first token there, and int64
    ``[k]``: which of them each of its tokens is in."""
    numbers, firsts, inverse = np.unique(state.decisions, return_index=True, return_inverse=True)
    first = int(numbers[0]) if len(numbers) else 0
    return PieceValues(first=first, values=values[firsts]), inverse


def _decisions(places: NDArray[np.int64], level: Level) -> NDArray[np.int64]:
    """Return the number of the decision each action token of a segment belongs to; they stand at ``places``."""
    if level == "token":
        return np.arange(len(places))
    return np.cumsum(np.diff(places, prepend=places[:1]) > 1)


def _decision_rewards(
    states: Sequence[PieceStates], costs: Mapping[tuple[str, int], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return what each decision of a trajectory earned, float64 ``[m]``, after its costs."""
    pieces = [state.piece for state in states]
    earned = token_rewards(pieces)
    if costs:
        segments = dict.fromkeys((p.trajectory_id, p.segment) for p in pieces if p.loss_mask.any())
        earned = earned - np.concatenate([np.zeros(0), *(costs[key] for key in segments)])
    owned = np.concatenate([state.decisions[state.piece.loss_mask[state.places]] for state in states])
    return np.bincount(owned, weights=earned).astype(np.float64)
