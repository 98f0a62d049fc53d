"""Several estimates of one token's advantage, from windows that overlap, into the one that is learned from.

Owns the choice among estimates. Knows neither how they were made nor what a batch is.

``mean``            all windows that hold the token count the same
``nearest_centre``  the window in whose middle the token lies most nearly: it has context on both sides (ties: the earlier)
``last``            the latest window: its estimates are cut off furthest in the future

Invariants: a token that one window holds keeps that estimate by the bit; equal estimates give that value by the bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotpot.experience.sequences.segments import TrainingSequence

Merge = Literal["mean", "nearest_centre", "last"]
Estimate = Callable[[TrainingSequence, NDArray[np.int64]], NDArray[np.float64]]
"""From a piece and the places ``[k]`` in it of all its action tokens, context too, to an estimate for each, ``[k]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowEstimates:
    """Estimates float64 ``[k]`` of a window that covers tokens ``begin .. end`` of a segment, for its action tokens:
    numbers ``first .. first + k`` among the segment's."""

    begin: int
    end: int
    first: int
    values: NDArray[np.float64]


def merge_estimates(
    windows: Sequence[WindowEstimates], places: NDArray[np.int64], method: Merge
) -> NDArray[np.float64]:
    """Return one estimate per action token, float64 ``[n]``. ``places`` int64 ``[n]``: where they stand in the segment.

    ``windows`` in order of ``begin``, each action token in at least one of them.
    """
    merged = np.full(len(places), np.nan)
    count = np.zeros(len(places), dtype=np.int64)
    difference = np.zeros(len(places))
    distance = np.full(len(places), np.inf)
    for window in windows:
        part = slice(window.first, window.first + len(window.values))
        new = count[part] == 0
        count[part] += 1
        if method == "mean":
            # Sums of differences to the first estimate: equal estimates leave no rounding behind.
            merged[part] = np.where(new, window.values, merged[part])
            difference[part] += window.values - merged[part]
        elif method == "last":
            merged[part] = window.values
        else:
            away = np.abs(places[part] - (window.begin + window.end - 1) / 2)
            nearer = away < distance[part]
            merged[part] = np.where(nearer, window.values, merged[part])
            distance[part] = np.minimum(away, distance[part])
    return np.where(count > 1, merged + difference / np.maximum(count, 1), merged)


def own_advantages(
    pieces: Sequence[TrainingSequence], estimate: Estimate, method: Merge
) -> list[NDArray[np.float64]]:
    """Return the merged advantages of each piece's own loss tokens, float64 ``[k]``, for all pieces of one segment.

    ``pieces`` in order of ``begin``; together they own every action token of the segment they hold.
    """
    if len(pieces) == 1:
        # Nothing to merge, as in most runs: the longer way gives these very values.
        return [estimate(pieces[0], np.flatnonzero(pieces[0].loss_mask))]
    places = action_places(pieces)
    windows = []
    for piece in pieces:
        held = places_within(piece, places)
        values = estimate(piece, places[held] - piece.begin)
        end = piece.begin + len(piece.tokens)
        windows.append(WindowEstimates(begin=piece.begin, end=end, first=held.start, values=values))
    merged = merge_estimates(windows, places, method)
    return [merged[np.searchsorted(places, _own(piece))] for piece in pieces]


def action_places(pieces: Sequence[TrainingSequence]) -> NDArray[np.int64]:
    """Return where the action tokens of a segment stand in it, int64 ``[n]`` ascending, from all its pieces."""
    return np.sort(np.concatenate([_own(piece) for piece in pieces]))


def places_within(piece: TrainingSequence, places: NDArray[np.int64]) -> slice:
    """Return which of the segment's action ``places`` ``piece`` can estimate: those with a token of it before them."""
    first, stop = np.searchsorted(places, [piece.begin + 1, piece.begin + len(piece.tokens)])
    return slice(int(first), int(stop))


def _own(piece: TrainingSequence) -> NDArray[np.int64]:
    return piece.begin + np.flatnonzero(piece.loss_mask).astype(np.int64)
