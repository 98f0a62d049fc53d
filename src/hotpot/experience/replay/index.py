"""One line per training trajectory that an update learned fresh: what the sampler needs, in NumPy columns.

Owns the columns, the group signal and the epoch. Holds no token. Knows no file: the record comes as an Arrow table of
narrow columns, what a process learns as trajectories.

A trajectory is *eligible* where its group has signal (rewards differ) and its own advantage is not 0: the rule by which
the learner keeps groups. A *replay epoch* begins with the first update that replayed a trajectory again, and everything
is replayed in it at most once; so the recorded consumptions alone say where the epoch stands.

Invariants: memory is flat per trajectory (some 80 bytes and the id); the same trajectories give the same signal in any
order of arrival; lines are never moved, so a line's number stays good.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotpot.errors import StoreError
from hotpot.experience.replay.drawn import Peer
from hotpot.experience.replay.keys import id_keys
from hotpot.ids import first_try
from hotpot.types import EndReason, Purpose, Split, Trajectory

EQUAL_REWARD_TOLERANCE = 1e-6
"""Rewards count as equal where their spread is at most this times the largest magnitude, or this itself where magnitudes are
below 1: float32 rounding of equal rewards stays under it, and dividing by a deviation that small would turn rounding into
full-size advantages. The learner's advantages go by it too."""

UNKNOWN_SEGMENT = -1
"""Log segment of a trajectory that was not in the lake when the index looked."""

_FIELDS: list[tuple[str, pa.DataType]] = [
    ("trajectory_id", pa.string()),
    ("group_id", pa.string()),
    ("env", pa.string()),
    ("reward", pa.float64()),
    ("success", pa.bool_()),
    ("num_tokens", pa.int64()),
    ("update", pa.int64()),
    ("segment", pa.int64()),
]

SCHEMA = pa.schema(_FIELDS)
"""What :meth:`Index.extend` takes. ``update`` learned it fresh; ``segment`` is its log segment, or unknown."""

_KINDS: dict[str, Any] = {
    "ids": np.dtypes.StringDType(),
    "keys": np.uint64,
    "chances": np.uint64,
    "groups": np.int32,
    "envs": np.int32,
    "rewards": np.float64,
    "successes": np.bool_,
    "num_tokens": np.int64,
    "updates": np.int64,
    "segments": np.int64,
    "advantages": np.float64,
    "eligible": np.bool_,
    "present": np.bool_,
    "consumed": np.bool_,
}


class Index:
    """The columns, each an array ``[num_lines]`` that grows.

    ``ids`` text and ``keys`` their hashes; ``chances`` the keys that a draw goes by, the same for every try at an episode;
    ``groups`` and ``envs`` numbers of names; ``rewards``, ``successes``,
    ``num_tokens``, ``updates`` (that learned it fresh), ``segments`` (of the log), ``advantages`` (reward minus its
    group's mean), ``eligible``, ``present`` (still in the record), ``consumed`` (replayed in this epoch).
    """

    ids: NDArray[Any]
    keys: NDArray[np.uint64]
    chances: NDArray[np.uint64]
    groups: NDArray[np.int32]
    envs: NDArray[np.int32]
    rewards: NDArray[np.float64]
    successes: NDArray[np.bool_]
    num_tokens: NDArray[np.int64]
    updates: NDArray[np.int64]
    segments: NDArray[np.int64]
    advantages: NDArray[np.float64]
    eligible: NDArray[np.bool_]
    present: NDArray[np.bool_]
    consumed: NDArray[np.bool_]

    def __init__(self) -> None:
        self.num_lines = 0
        self.last_update = 0
        self.epoch_since = 0
        self.env_codes: dict[str, int] = {}
        self._group_codes: dict[str, int] = {}
        self._group_names: list[str] = []
        self._store = {name: np.zeros(0, kind) for name, kind in _KINDS.items()}
        self._show(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns in use; ids longer than 15 characters take some more."""
        return self.num_lines * sum(array.itemsize for array in self._store.values())

    def extend(self, lines: pa.Table) -> NDArray[np.int64]:
        """Append ``lines`` (:data:`SCHEMA`) and return their numbers, int64 ``[n]``.

        Raises :class:`StoreError` where one of them is in the index already.
        """
        old, new = self.num_lines, self.num_lines + lines.num_rows
        ids: list[Any] = lines.column("trajectory_id").to_pylist()
        keys = id_keys(ids)
        if len(np.unique(keys)) < len(keys) or (old and np.isin(keys, self.keys).any()):
            raise StoreError(
                f"a trajectory of update {lines.column('update')[0]} is in the replay index already; each is added once, "
                "by the update that learned it fresh"
            )
        self._show(new)
        self.ids[old:] = ids
        self.keys[old:] = keys
        self.chances[old:] = id_keys(first_try(name) for name in ids)
        self.groups[old:] = self._coded(lines.column("group_id"), self._group_codes, self._group_names)
        self.envs[old:] = self._coded(lines.column("env"), self.env_codes, [])
        self.rewards[old:] = lines.column("reward").to_numpy()
        self.successes[old:] = lines.column("success").to_numpy()
        self.num_tokens[old:] = lines.column("num_tokens").to_numpy()
        self.updates[old:] = lines.column("update").to_numpy()
        self.segments[old:] = lines.column("segment").to_numpy()
        self.present[old:] = True
        self.last_update = max(self.last_update, int(self.updates[old:].max(initial=0)))
        places = np.arange(old, new)
        self._settle(places if old == 0 else self._whole_groups(places))
        return places

    def places_of(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the lines with ``keys``, int64 ``[n]``; -1 where there is none."""
        if not self.num_lines:
            return np.full(len(keys), -1, np.int64)
        order = np.argsort(self.keys)
        found = order[np.minimum(np.searchsorted(self.keys, keys, sorter=order), self.num_lines - 1)]
        return np.where(self.keys[found] == keys, found, -1)

    def consume(self, update: int, places: NDArray[np.int64]) -> None:
        """Take down that ``update`` replayed ``places``; a repeat begins a new epoch with this update."""
        if self.consumed[places].any():
            self.consumed[:] = False
            self.epoch_since = update
        self.consumed[places] = True

    def discard(self, places: NDArray[np.int64]) -> None:
        """Take lines out of every later draw and group: the record does not hold them any more."""
        self.present[places] = self.eligible[places] = False

    def peers(self, places: NDArray[np.int64]) -> list[tuple[Peer, ...]]:
        """Return, for each of ``places``, the other members of its group, in the order of their keys."""
        members = self._whole_groups(places)
        members = members[np.lexsort((self.keys[members], self.groups[members]))]
        groups = self.groups[members]
        firsts = np.searchsorted(groups, self.groups[places], side="left")
        lasts = np.searchsorted(groups, self.groups[places], side="right")
        return [
            tuple(self._peer(other) for other in members[first:last] if other != place)
            for place, first, last in zip(places, firsts, lasts, strict=True)
        ]

    def group_names(self, places: NDArray[np.int64]) -> list[str]:
        """Return the id of each line's group."""
        return [self._group_names[code] for code in self.groups[places].tolist()]

    def _peer(self, place: int) -> Peer:
        return Peer(
            trajectory_id=str(self.ids[place]),
            group_id=self._group_names[int(self.groups[place])],
            reward=float(self.rewards[place]),
        )

    def _show(self, size: int) -> None:
        """Make every column ``[size]``, with room to grow."""
        for name, array in self._store.items():
            if len(array) < size:
                grown = np.zeros(max(size, 2 * len(array)), array.dtype)
                grown[: len(array)] = array
                self._store[name] = grown
            setattr(self, name, self._store[name][:size])
        self.num_lines = size

    @staticmethod
    def _coded(column: Any, codes: dict[str, int], names: list[str]) -> NDArray[np.int32]:
        encoded = column.combine_chunks().dictionary_encode()
        known = []
        for name in encoded.dictionary.to_pylist():
            if name not in codes:
                codes[name] = len(codes)
                names.append(name)
            known.append(codes[name])
        indices: NDArray[np.int32] = encoded.indices.to_numpy()
        return np.array(known, np.int32)[indices]

    def _whole_groups(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.flatnonzero(np.isin(self.groups, self.groups[places]) & self.present)

    def _settle(self, places: NDArray[np.int64]) -> None:
        """Work out advantage and eligibility of whole groups."""
        order = places[np.lexsort((self.keys[places], self.groups[places]))]
        self.advantages[order], self.eligible[order] = group_signal(self.groups[order], self.rewards[order])


def group_signal(
    groups: NDArray[np.int32], rewards: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return each trajectory's advantage (reward minus its group's mean) and whether it has a signal to learn from.

    ``groups`` int32 ``[n]`` sorted, ``rewards`` float64 ``[n]``. No signal: the group's rewards are equal up to
    :data:`EQUAL_REWARD_TOLERANCE` or not finite, or the advantage is 0 up to it.
    """
    if not len(groups):
        return np.zeros(0), np.zeros(0, np.bool_)
    firsts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
    sizes = np.diff(np.append(firsts, len(groups)))
    with np.errstate(invalid="ignore"):
        means = np.add.reduceat(rewards, firsts) / sizes
        spreads = np.maximum.reduceat(rewards, firsts) - np.minimum.reduceat(rewards, firsts)
        advantages = rewards - np.repeat(means, sizes)
    tolerances = EQUAL_REWARD_TOLERANCE * np.maximum(1.0, np.maximum.reduceat(np.abs(rewards), firsts))
    signal = np.repeat(spreads > tolerances, sizes) & (np.abs(advantages) > np.repeat(tolerances, sizes))
    return advantages, signal


def learnable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return those that an update learns from: training, not hold-out, not cut by a time limit."""
    return [
        trajectory
        for trajectory in trajectories
        if trajectory.row.purpose == Purpose.TRAINING
        and trajectory.row.split == Split.TRAIN
        and trajectory.row.end_reason != EndReason.MAX_SECONDS
    ]


def lines_of(update: int, trajectories: Iterable[Trajectory]) -> pa.Table:
    """Return the lines (:data:`SCHEMA`) of trajectories that ``update`` learned; their log segment is unknown yet."""
    rows = [
        {
            "trajectory_id": trajectory.row.trajectory_id,
            "group_id": trajectory.row.group_id,
            "env": trajectory.row.env,
            "reward": trajectory.row.reward,
            "success": trajectory.row.success,
            "num_tokens": trajectory.row.num_prompt_tokens + trajectory.row.num_sampled_tokens,
            "update": update,
            "segment": UNKNOWN_SEGMENT,
        }
        for trajectory in trajectories
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)
