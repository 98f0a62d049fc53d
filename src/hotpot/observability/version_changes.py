"""Every change of a version inside one run, and how likely it moved the reward. Pure: groups in, changes out.

Owns what counts as a change, the ranking, and the folding of policy publishes. Knows no reader; the size of a jump is
:mod:`jumps`, what changed in the source is :mod:`changes`.

A **stretch** is a version in use: from its first to its last group between which no whole update went without it (two
versions that run side by side for a while are one change, not many; going back to an old version is a change). A
**change** is where one stretch of a kind begins after another's beginning. Changes rank by the score of their jump, each seen
beside the others that passed the threshold below: what a change did is not charged to one that lies near it.

The policy changes with every update: that is the trend, not news. A publish is a change of its own only where its jump
passes the threshold that the largest of so many publishes of pure noise passes once in twenty runs (the best first, then
again beside it), or where other weights than the run's own latest were taken up; all others are folded into one record.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hotpot.observability.jumps import (
    Estimate,
    Jump,
    difference,
    jump,
    mean_interval,
    threshold,
    window,
    window_width,
)

KINDS: Mapping[str, str] = {
    "env": "env_version",
    "reward": "reward_version",
    "prompt": "prompt_version",
    "policy": "policy_version",
    "schema": "schema_version",
}
"""The five kinds of version and their columns. Where scores are equal, a kind is listed before those behind it."""

MOST_STANDING_OUT = 5
"""Most policy publishes that are listed for their jump, and most steps that others are seen beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPoint:
    """The training trajectories of one group under one set of versions, as one point of the curve.

    ``versions`` by kind (policy: the oldest that sampled in it). ``update`` collected the group (None: none yet).
    """

    versions: Mapping[str, str]
    reward: float
    num_trajectories: int
    num_steps: int
    update: int | None
    started_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateKl:
    """The two KL estimates of one update (None: it took no optimiser step, or there is no reference)."""

    approx_kl: float | None
    reference_kl: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A quantity before and after a change, and after minus before (Welch)."""

    before: Estimate | None
    after: Estimate | None
    difference: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """One change of one version.

    ``update`` collected the first group under ``new`` (None: none yet), ``steps_before`` training steps were on record by
    then; ``since_us`` is when the group before it began, ``time_us`` when its first did. The counts are the training's
    under each version, in this stretch. ``reward`` compares group means in the window, ``approx_kl`` and ``reference_kl``
    the updates that collected those groups. ``jump`` is the reward's against its trend, ``score`` its score (0: no jump can
    be told). ``together`` are the other kinds that changed at the same place: the reward can't tell them apart.
    """

    kind: str
    old: str
    new: str
    place: int
    update: int | None
    steps_before: int
    since_us: int
    time_us: int
    num_steps: tuple[int, int]
    num_trajectories: tuple[int, int]
    reward: Contrast
    approx_kl: Contrast
    reference_kl: Contrast
    jump: Jump | None
    score: float
    together: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedPublishes:
    """The policy publishes that are no change of their own; ``largest_score`` is the largest of theirs (0: none can be
    told), at version ``at_version``, ``threshold`` what it would have had to pass."""

    count: int
    first_version: str
    last_version: str
    largest_score: float
    at_version: str
    threshold: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    version: str
    first: int
    members: tuple[int, ...]


def find_changes(
    points: Sequence[GroupPoint], kl: Mapping[int, UpdateKl], taken_up: Collection[str] = ()
) -> tuple[list[VersionChange], FoldedPublishes | None]:
    """Return the changes among ``points`` (in order of time), most likely influence first, and the folded publishes.

    ``kl`` by update; ``taken_up`` are policy versions whose weights came from elsewhere than the run's latest.
    """
    stretches = {kind: _stretches(points, kind) for kind in KINDS}
    pairs = [(kind, old, new) for kind in KINDS for old, new in pairwise(stretches[kind])]
    listed = [pair for pair in pairs if pair[0] != "policy" or pair[2].version in taken_up]
    places = {pair[2].first for pair in listed}
    publishes = [pair for pair in pairs if pair not in listed]
    tried = [pair for pair in publishes if pair[2].first not in places]
    jumped, _ = _standing_out(points, listed, ())
    sudden, scores = _standing_out(points, tried, jumped)
    jumped |= sudden
    listed += [pair for pair in tried if pair[2].first in sudden]
    folded = [pair for pair in publishes if pair not in listed]
    moments = {pair[2].first for pair in listed}
    changes = [_change(points, kl, pair, moments, jumped) for pair in listed]
    changes = [replace(change, together=_together(change, changes)) for change in changes]
    kinds = list(KINDS)
    changes.sort(key=lambda change: (-change.score, kinds.index(change.kind), change.place))
    return changes, _folded(folded, scores, len(tried))


def _stretches(points: Sequence[GroupPoint], kind: str) -> list[_Stretch]:
    """Return the stretches of a kind's versions, by the place where each begins."""
    numbers: dict[object, int] = {}
    members: dict[str, list[list[int]]] = {}
    latest: dict[str, int] = {}
    for place, point in enumerate(points):
        # A group that no update collected yet counts as an update of its own.
        number = numbers.setdefault(("open", place) if point.update is None else point.update, len(numbers))
        version = point.versions[kind]
        runs = members.setdefault(version, [])
        if not runs or number > latest[version] + 1:
            runs.append([])
        runs[-1].append(place)
        latest[version] = max(number, latest.get(version, number))
    found = [
        _Stretch(version=version, first=run[0], members=tuple(run))
        for version, runs in members.items()
        for run in runs
    ]
    return sorted(found, key=lambda stretch: stretch.first)


_Pair = tuple[str, _Stretch, _Stretch]


def _standing_out(
    points: Sequence[GroupPoint], pairs: Sequence[_Pair], jumped: Collection[int]
) -> tuple[set[int], dict[str, float]]:
    """Return the places where one of ``pairs`` passes the threshold beside ``jumped``, and the scores of the others.

    The best comes first; what is left is tried again with a step there, so that its neighbours are not taken for jumps.
    """
    found: set[int] = set()
    limit = threshold(len({new.first for _, _, new in pairs}))
    for left in range(MOST_STANDING_OUT, -1, -1):
        rest = [pair for pair in pairs if pair[2].first not in found]
        scores = {pair[2].version: _score(_jump(points, pair, {*jumped, *found})) for pair in rest}
        best = max(rest, key=lambda pair: scores[pair[2].version], default=None)
        if not left or best is None or scores[best[2].version] <= limit:
            break
        found.add(best[2].first)
    return found, scores


def _folded(folded: Sequence[_Pair], scores: Mapping[str, float], num_tried: int) -> FoldedPublishes | None:
    if not folded:
        return None
    at_version = max((new.version for _, _, new in folded), key=lambda version: scores.get(version, 0.0))
    return FoldedPublishes(
        count=len(folded),
        first_version=folded[0][1].version,
        last_version=folded[-1][2].version,
        largest_score=scores.get(at_version, 0.0),
        at_version=at_version,
        threshold=threshold(num_tried),
    )


def _change(
    points: Sequence[GroupPoint],
    kl: Mapping[int, UpdateKl],
    pair: _Pair,
    moments: Collection[int],
    jumped: Collection[int],
) -> VersionChange:
    kind, old, new = pair
    begin, end = _window(points, new)
    # The means are of what lies between this change and its neighbours.
    begin = max([begin, *(place for place in moments if place < new.first)])
    end = min([end, *(place for place in moments if place > new.first)])
    under_new = _under_new(points, pair, begin, end)
    before = [points[place] for place in range(begin, end) if not under_new[place - begin]]
    after = [points[place] for place in range(begin, end) if under_new[place - begin]]
    found = _jump(points, pair, jumped)
    later = {point.update for point in after}
    updates = ([u for u in _updates(before) if u not in later], _updates(after))
    return VersionChange(
        kind=kind,
        old=old.version,
        new=new.version,
        place=new.first,
        update=points[new.first].update,
        steps_before=sum(point.num_steps for point in points[: new.first]),
        since_us=points[new.first - 1].started_us,
        time_us=points[new.first].started_us,
        num_steps=(_total(points, old, "num_steps"), _total(points, new, "num_steps")),
        num_trajectories=(_total(points, old, "num_trajectories"), _total(points, new, "num_trajectories")),
        reward=_contrast([point.reward for point in before], [point.reward for point in after]),
        approx_kl=_contrast(*(_known(kl[u].approx_kl for u in side if u in kl) for side in updates)),
        reference_kl=_contrast(*(_known(kl[u].reference_kl for u in side if u in kl) for side in updates)),
        jump=found,
        score=_score(found),
    )


def _jump(points: Sequence[GroupPoint], pair: _Pair, jumped: Iterable[int]) -> Jump | None:
    begin, end = _window(points, pair[2])
    rewards = np.array([points[place].reward for place in range(begin, end)])
    others = [place - begin for place in jumped if place != pair[2].first]
    return jump(rewards, _under_new(points, pair, begin, end), others)


def _window(points: Sequence[GroupPoint], new: _Stretch) -> tuple[int, int]:
    return window(new.first, len(points), window_width(len(points)))


def _under_new(points: Sequence[GroupPoint], pair: _Pair, begin: int, end: int) -> NDArray[np.bool_]:
    """Return bool ``[end - begin]``: by its version where a point has the old or the new one, else by its place."""
    kind, old, new = pair
    sides = {old.version: False, new.version: True}
    found = [sides.get(points[at].versions[kind], at >= new.first) for at in range(begin, end)]
    return np.array(found, np.bool_)


def _contrast(before: Sequence[float], after: Sequence[float]) -> Contrast:
    return Contrast(
        before=mean_interval(before), after=mean_interval(after), difference=difference(before, after)
    )


def _together(change: VersionChange, changes: Sequence[VersionChange]) -> tuple[str, ...]:
    return tuple(other.kind for other in changes if other.place == change.place and other.kind != change.kind)


def _updates(points: Sequence[GroupPoint]) -> list[int]:
    return list(dict.fromkeys(point.update for point in points if point.update is not None))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _total(points: Sequence[GroupPoint], stretch: _Stretch, name: str) -> int:
    return sum(int(getattr(points[place], name)) for place in stretch.members)


def _score(found: Jump | None) -> float:
    return 0.0 if found is None else found.score
