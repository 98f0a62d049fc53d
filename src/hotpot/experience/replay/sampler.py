"""Which trajectories a draw takes, and with what weight: pure, no clock, file or store.

Owns the choice out of a :class:`Pool` of eligible trajectories. A draw goes through passes: what was not replayed in
this epoch first, hot and cold in their shares (of an environment's quota too), each filling up what the other lacks;
then, where that is not enough, what was. Inside a pass each trajectory has an inclusion probability

    pi_i = min(1, c w_i)   with c such that the pi_i add up to the pass's size, within the environments' quotas

(w_i from the weighting), and systematic sampling in an order random by key takes each with exactly that probability,
none twice, and exactly as many as asked for (Madow 1949; Tillé, "Sampling Algorithms", 2006, sect. 7.1).

The loss weight is (1 / (N p_i)) ** importance_exponent as in prioritised replay (Schaul et al., arXiv:1511.05952, sect.
3.4), where p_i = pi_i / size is the chance of i at any one place of the draw, N the trajectories to choose from; but
normalised to the mean 1 over the draw instead of the maximum 1, so that replay does not shrink the step. With exponent 1
the weighted mean over a draw estimates the plain mean over the pool, whatever shares, weighting and quotas did.

Invariants: the choice depends on the set of trajectories, the settings, seed and update, not on any order; no trajectory
is chosen twice; no environment exceeds its quota of the size asked for; no Python loop goes over trajectories.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hotpot.config import ReplaySection
from hotpot.experience.replay.keys import mixed, salt_of, unit

_LOWEST_WEIGHT = 2.0**-40
"""No trajectory's weight in a choice falls below this, however old it is."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """The eligible trajectories of one draw, arrays ``[n]``.

    ``keys`` uint64, one of its own each; ``hot`` bool; ``consumed`` bool, replayed in this epoch already; ``envs`` int32
    number of the environment; ``ages`` int64 updates since it was collected; ``positive`` bool, its advantage is.
    """

    keys: NDArray[np.uint64]
    hot: NDArray[np.bool_]
    consumed: NDArray[np.bool_]
    envs: NDArray[np.int32]
    ages: NDArray[np.int64]
    positive: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """Chosen places in the pool, int64 ``[k]`` in an order by key, and their loss weights, float64 ``[k]``, mean 1."""

    places: NDArray[np.int64]
    weights: NDArray[np.float64]


def draw_size(share: float, num_fresh: int) -> int:
    """Return how many trajectories make up ``share`` of a batch whose other ``num_fresh`` are fresh."""
    return math.floor(num_fresh * share / (1.0 - share) + 0.5)


def choose(
    pool: Pool, settings: ReplaySection, *, quotas: Mapping[int, float], seed: int, update: int, size: int
) -> Choice:
    """Return up to ``size`` places of ``pool``; fewer where the pool is smaller or the quotas leave no more room.

    ``quotas`` are the settings' by number of the environment.
    """
    # Sums depend on order in the last bit; a fixed order keeps the draw independent of the pool's.
    order = np.argsort(pool.keys)
    pool = Pool(**{field.name: getattr(pool, field.name)[order] for field in fields(Pool)})
    drawing = _Drawing(pool, settings, quotas, size, salt_of(seed, update))
    for members in (~pool.consumed, pool.consumed):
        drawing.take_tiers(members, settings.hot_share)
    places, weights = drawing.result(settings.importance_exponent)
    return Choice(places=order[places], weights=weights)


class _Drawing:
    """One draw in progress: what is chosen, what room is left, and the probabilities so far."""

    def __init__(
        self, pool: Pool, settings: ReplaySection, quotas: Mapping[int, float], size: int, salt: int
    ) -> None:
        self._pool, self._salt, self._left = pool, salt, size
        self._weights = choice_weights(pool, settings)
        self._chosen = np.zeros(len(pool.keys), np.bool_)
        self._missed = np.ones(len(pool.keys))
        count = int(pool.envs.max(initial=-1)) + 1
        self._room = np.full(count, size, np.int64)
        self._limited = np.zeros(count, np.bool_)
        for env, share in quotas.items():
            if env < count:
                self._room[env] = min(size, math.ceil(share * size - _ROUNDING))
                self._limited[env] = True
        self._passes = 0

    def take_tiers(self, members: NDArray[np.bool_], hot_share: float) -> None:
        """Fill up from ``members``: hot in its share, then cold, then hot again with what cold lacks."""
        hot, cold = members & self._pool.hot, members & ~self._pool.hot
        wanted = math.floor(self._left * hot_share + 0.5)
        # Of a quota hot leaves cold its part, or cold of that environment would never be seen.
        first = np.where(self._limited, np.ceil(self._room * hot_share), self._room).astype(np.int64)
        self._take(hot, max(wanted, self._left - int(cold.sum())), first)
        self._take(cold, self._left, self._room)
        self._take(hot, self._left, self._room)

    def _take(self, members: NDArray[np.bool_], size: int, room: NDArray[np.int64]) -> None:
        places = np.flatnonzero(members & ~self._chosen)
        envs = self._pool.envs[places]
        size = min(size, int(np.minimum(np.bincount(envs, minlength=len(room)), room).sum()))
        if size <= 0:
            return
        self._passes += 1
        salt = salt_of(self._salt, self._passes)
        chances = inclusion(self._weights[places], envs, size, room)
        order = np.lexsort((mixed(self._pool.keys[places], salt), envs))
        taken = order[systematic(chances[order], unit(salt))]
        taken = taken[_within(envs[taken], room)]
        self._missed[places] *= 1.0 - chances
        self._chosen[places[taken]] = True
        self._room = self._room - np.bincount(envs[taken], minlength=len(room))
        self._left -= len(taken)

    def result(self, exponent: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return places and weights of what was chosen. Who stood in several passes had the chance of any of them."""
        places = np.flatnonzero(self._chosen)
        places = places[np.argsort(mixed(self._pool.keys[places], self._salt))]
        weights = (1.0 - self._missed[places]) ** -exponent
        return places, weights / weights.mean() if len(weights) else weights


def choice_weights(pool: Pool, settings: ReplaySection) -> NDArray[np.float64]:
    """Return w_i of each trajectory, float64 ``[n]``: how many times as often as others it is drawn."""
    if settings.weighting == "recency":
        return np.maximum(2.0 ** (-pool.ages / settings.half_life_updates), _LOWEST_WEIGHT)
    if settings.weighting == "positive":
        return np.where(pool.positive, settings.positive_weight, 1.0)
    return np.ones(len(pool.keys))


def inclusion(
    weights: NDArray[np.float64], envs: NDArray[np.int32], size: int, room: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the inclusion probabilities, float64 ``[n]``: their sum is ``size``, that of environment e at most room[e].

    ``size`` is at most what ``room`` and the trajectories allow. What an environment's room cuts off goes to the others.
    """
    chances = _capped(weights, size)
    full = np.zeros(len(room), np.bool_)
    while True:
        over = (np.bincount(envs, chances, len(room)) > room + _ROUNDING) & ~full
        if not over.any():
            return chances
        full |= over
        for env in np.flatnonzero(over):
            members = envs == env
            chances[members] = _capped(weights[members], int(room[env]))
        rest = ~full[envs]
        chances[rest] = _capped(weights[rest], size - int(room[full].sum()))


def _capped(weights: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return min(1, c w) with c such that the sum is ``size`` (at most n)."""
    certain = np.zeros(len(weights), np.bool_)
    while True:
        left = size - int(certain.sum())
        rest = weights[~certain].sum()
        scaled = weights * (left / rest if left > 0 and rest > 0 else 0.0)
        more = (scaled >= 1.0 - _ROUNDING) & ~certain
        if not more.any():
            return np.where(certain, 1.0, scaled)
        certain |= more


def systematic(chances: NDArray[np.float64], start: float) -> NDArray[np.int64]:
    """Return the places where start, start + 1, ... fall on the line that ``chances`` make end to end; each once."""
    edges = np.cumsum(chances)
    picks = start + np.arange(round(float(edges[-1])))
    places = np.searchsorted(edges, picks, side="right")
    # Rounding may push the last pick over the end, or two onto one place: a pass more makes up for a loss.
    return np.unique(np.minimum(places, len(chances) - 1))


def _within(envs: NDArray[np.int32], room: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of the picks (``envs`` sorted) keep within ``room``: rounding may add one to a full quota."""
    firsts = np.searchsorted(envs, envs, side="left")
    return np.arange(len(envs)) - firsts < room[envs]
