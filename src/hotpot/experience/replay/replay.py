"""The door to hot and cold: what a topology adds, and what it draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from hotpot.config import ReplaySection
from hotpot.experience.reader import RunReader
from hotpot.experience.replay.drawn import Draw
from hotpot.types import Trajectory


class Replay:
    """Hot, cold and the sampler over both, for one run. One thread; made by :meth:`open`.

    The order in an update: :meth:`draw`, learn, record the update (consumptions with source ``hot`` and ``cold``),
    :meth:`add`. A draw is part of the epoch once :meth:`add` of the same update says that the record has it, so a
    process that was killed in between draws as if it had never drawn.
    """

    @classmethod
    def open(cls, reader: RunReader, settings: ReplaySection, *, seed: int, cache_folder: Path) -> Self:
        """Return the replay of a run as its record says it stands: the same draws follow as in the process before.

        ``cache_folder`` may be empty, missing or of any age; it is made and kept in order.
        """
        raise NotImplementedError

    def add(self, update: int, trajectories: Sequence[Trajectory]) -> None:
        """Hear that ``update`` is recorded: it learned ``trajectories`` fresh (none is fine), and what was drawn for it.

        Call it after every update. What a time limit cut, and groups without signal, may be among them.
        """
        raise NotImplementedError

    def draw(self, update: int, num_fresh: int) -> Draw:
        """Return what ``update`` replays beside ``num_fresh`` fresh trajectories: share / (1 - share) as many, rounded.

        A pure function of the record, the seed and the arguments: asked twice before :meth:`add`, it answers the same.
        Raises :class:`hotpot.errors.StoreError` where the record can't be read.
        """
        raise NotImplementedError
