"""The door to hot and cold: what a topology adds, and what it draws.

Owns the joining of index, hot, cold and sampler, and the events of a draw. Knows no batch and no learner.

Invariant: index, hot and epoch are functions of the record. A process that opens a run draws exactly what the process
before it would have drawn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hotpot.config import ReplaySection
from hotpot.errors import StoreError
from hotpot.experience.reading.reader import RunReader
from hotpot.experience.replay.block import Block
from hotpot.experience.replay.cache import BlockCache
from hotpot.experience.replay.cold import Cold
from hotpot.experience.replay.drawn import Draw, Drawn
from hotpot.experience.replay.hot import Hot, good
from hotpot.experience.replay.index import Index, learnable, lines_of
from hotpot.experience.replay.keys import id_keys
from hotpot.experience.replay.record import read_last_update, read_lines, read_replayed
from hotpot.experience.replay.sampler import Choice, Pool, choose, draw_size
from hotpot.types import Trajectory

Events = list[tuple[str, dict[str, Any]]]


class Replay:
    """Hot, cold and the sampler over both, for one run. One thread; made by :meth:`open`.

    The order in an update: :meth:`draw`, learn, record the update (consumptions with source ``hot`` and ``cold``),
    :meth:`add`. A draw is part of the epoch once :meth:`add` of the same update says that the record has it, so a
    process that was killed in between draws as if it had never drawn.
    """

    def __init__(self, settings: ReplaySection, *, seed: int, index: Index, hot: Hot, cold: Cold) -> None:
        self.settings, self.index, self.hot, self.cold = settings, index, hot, cold
        self._seed = seed
        self._pending: dict[int, NDArray[np.int64]] = {}
        self._told_unused: set[str] = set()

    @classmethod
    def open(cls, reader: RunReader, settings: ReplaySection, *, seed: int, cache_folder: Path) -> Self:
        """Return the replay of a run as its record says it stands: the same draws follow as in the process before.

        ``cache_folder`` may be empty, missing or of any age; it is made and kept in order. Raises
        :class:`hotpot.errors.StoreError` where the record can't be read.
        """
        index, moment = Index(), reader.at_once()
        watermark, lines = read_lines(moment)
        index.extend(lines)
        index.last_update = max(index.last_update, read_last_update(moment))
        for update, ids in read_replayed(moment):
            places = index.places_of(id_keys(ids))
            known = places[places >= 0]
            # What a run took over from another one is a fresh use, though it is named cold.
            index.consume(update, known[index.updates[known] < update])
        cache = BlockCache(cache_folder, max_bytes=settings.cold_cache_bytes)
        hot = Hot(rounds=settings.hot_rounds, max_bytes=settings.hot_bytes)
        cold = Cold(reader, index, cache, watermark=watermark)
        replay = cls(settings, seed=seed, index=index, hot=hot, cold=cold)
        replay._refill_hot()
        return replay

    def add(self, update: int, trajectories: Sequence[Trajectory]) -> None:
        """Hear that ``update`` is recorded: it learned ``trajectories`` fresh (none is fine), and what was drawn for it.

        Call it after every update. What a time limit cut, and groups without signal, may be among them. Raises
        :class:`StoreError` where ``update`` was added before.
        """
        if update <= self.index.last_update:
            raise StoreError(
                f"update {update} is not after {self.index.last_update}, the last one that replay heard of; add each "
                "update once, in order, after it is recorded"
            )
        fresh = learnable(trajectories)
        places = self.index.extend(lines_of(update, fresh))
        self.index.last_update = update
        self.index.consume(update, self._pending.get(update, np.zeros(0, np.int64)))
        self._pending = {number: drawn for number, drawn in self._pending.items() if number > update}
        stays = np.flatnonzero(self._good(places))
        block = Block.of([fresh[place] for place in stays])
        self.hot.add(update, places[stays], self.index.advantages[places[stays]], block)

    def draw(self, update: int, num_fresh: int, *, missing: int = 0) -> Draw:
        """Return what ``update`` replays beside ``num_fresh`` fresh trajectories: share / (1 - share) as many, rounded, and
        ``missing`` more.

        A pure function of the record, the seed and the arguments: asked twice before :meth:`add`, it answers the same.
        Raises :class:`hotpot.errors.StoreError` where the record can't be read.
        """
        size = draw_size(self.settings.share, num_fresh) + missing
        events: Events = []
        while True:
            lines, choice = self._choose(update, size)
            hot = np.isin(lines, self.hot.places)
            found = self._fetch(lines, hot)
            gone = [place for place, trajectory in enumerate(found) if trajectory is None]
            if not gone:
                break
            # Deleted from the lake while this process held its line: it must not be drawn, so another is.
            events.append(("replay_gone", {"trajectories": self.index.ids[lines[gone]].tolist()}))
            self.index.discard(lines[gone])
            self.hot.discard(lines[gone])
        self._pending[update] = lines
        events += self._events(lines, size)
        peers = self.index.peers(lines)
        items = [
            Drawn(
                trajectory_id=trajectory.row.trajectory_id,
                group_id=trajectory.row.group_id,
                source="hot" if is_hot else "cold",
                weight=float(weight),
                trajectory=trajectory,
                peers=others,
            )
            for trajectory, is_hot, weight, others in zip(found, hot, choice.weights, peers, strict=True)
            if trajectory is not None
        ]
        return Draw(items=tuple(items), events=tuple(events))

    def _choose(self, update: int, size: int) -> tuple[NDArray[np.int64], Choice]:
        index, oldest = self.index, self.settings.max_staleness_updates
        eligible = index.eligible & index.present
        if oldest is not None:
            eligible &= index.updates >= update - oldest
        if self.settings.only_positive:
            eligible &= index.advantages > 0
        lines = np.flatnonzero(eligible)
        hot = np.zeros(index.num_lines, np.bool_)
        hot[self.hot.places] = True
        pool = Pool(
            keys=index.chances[lines],
            hot=hot[lines],
            consumed=index.consumed[lines],
            envs=index.envs[lines],
            ages=update - index.updates[lines],
            positive=index.advantages[lines] > 0,
        )
        quotas = {
            index.env_codes[name]: share
            for name, share in self.settings.quotas.items()
            if name in index.env_codes
        }
        choice = choose(pool, self.settings, quotas=quotas, seed=self._seed, update=update, size=size)
        return lines[choice.places], choice

    def _fetch(self, lines: NDArray[np.int64], hot: NDArray[np.bool_]) -> list[Trajectory | None]:
        found: list[Trajectory | None] = [None] * len(lines)
        keys = self.index.keys[lines]
        for block in self.hot.blocks():
            places = block.places_of(keys)
            at = np.flatnonzero(hot & (places >= 0))
            for place, trajectory in zip(at.tolist(), block.trajectories(places[at]), strict=True):
                found[place] = trajectory
        rest = np.flatnonzero(~hot)
        for place, cold in zip(rest.tolist(), self.cold.trajectories(lines[rest]), strict=True):
            found[place] = cold
        return found

    def _events(self, lines: NDArray[np.int64], size: int) -> Events:
        events: Events = [("replay_cache_failed", {"reason": reason}) for reason in self.cold.take_failures()]
        unused = self.settings.quotas.keys() - self.index.env_codes.keys() - self._told_unused
        if len(lines) and unused:
            self._told_unused |= unused
            events.append(
                ("replay_quota_unused", {"envs": sorted(unused), "known": sorted(self.index.env_codes)})
            )
        again = int(self.index.consumed[lines].sum())
        if again:
            detail = {"num": again, "epoch_since_update": self.index.epoch_since}
            events.append(("consumed_again", detail))
        if size and not len(lines):
            events.append(("replay_empty", {"wanted": size}))
        elif len(lines) < size:
            events.append(("replay_short", {"wanted": size, "drawn": len(lines)}))
        return events

    def _good(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which lines of one round are good, bool ``[n]``."""
        quantile = self.settings.hot_min_advantage_quantile
        return good(self.index.advantages[places], self.index.eligible[places], quantile)

    def _refill_hot(self) -> None:
        """Fill hot from the record, the newest round first, until a round before would not fit any more."""
        newest = self.index.last_update
        for update in range(newest, max(0, newest - self.settings.hot_rounds), -1):
            places = np.flatnonzero(self.index.updates == update)
            places = places[self._good(places)]
            found = self.cold.trajectories(places)
            there = [place for place, trajectory in enumerate(found) if trajectory is not None]
            block = Block.of([trajectory for trajectory in found if trajectory is not None])
            lines = places[there]
            self.hot.add(update, lines, self.index.advantages[lines], block, newest=newest)
            if self.hot.is_full:
                return
