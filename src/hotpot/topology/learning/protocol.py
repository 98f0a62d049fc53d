"""What a topology asks of whoever learns: one update at a time, begun and asked for.

Owns the protocol and the records. Knows no queue, no store and no engine.

::

    begin(work) ──► … ──► poll() ──► Learned(result, weights' checksum)      weights() ──► engine.publish
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hotpot.errors import HotpotError
from hotpot.experience import TrainingSequence
from hotpot.learner import Member, UpdateResult
from hotpot.models import Weights

TOLD = (HotpotError, MemoryError, RuntimeError, OSError)
"""What :meth:`Learning.poll` raises of what the learner raised. Anything else is a mistake in the code, and ends the process it
happens in."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One update to learn: what :meth:`hotpot.learner.Learner.update` is given."""

    update: int
    policy_version: int
    sequences: Sequence[TrainingSequence]
    peers: Sequence[Member] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Learned:
    """What came of an update: its result, the seconds it took, and the checksum of the weights that it made
    (:func:`hotpot.models.checksum`)."""

    result: UpdateResult
    seconds: float
    checksum: str


class Learning(Protocol):
    """Whoever learns. One piece of work is under way at most; nothing waits but :meth:`poll`, as long as it is told."""

    @property
    def busy(self) -> bool:
        """Whether something was begun whose end was not taken by :meth:`poll` yet."""

    def begin(self, work: Work) -> None:
        """Begin an update. Raises :class:`hotpot.errors.LearnerError` where one is under way."""

    def begin_save(self, folder: Path, files: Mapping[str, bytes], run: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint into ``folder``, as :meth:`hotpot.learner.Learner.save` does."""

    def poll(self, timeout_s: float = 0.0) -> Learned | Path | None:
        """Return what came of the work that was begun (the folder, for a checkpoint); None where it is not done within
        ``timeout_s`` seconds.

        Raises what the learner raised, and :class:`hotpot.errors.LearnerError` where it died or beats no more.
        """

    def weights(self) -> Weights:
        """Return the weights after the last update that was taken by :meth:`poll`. They stay as they are until the update
        after the next one is begun."""

    def beat(self) -> tuple[int, float]:
        """Return how much progress was made so far (any number that grows) and when last, on the monotonic clock."""

    def close(self) -> None:
        """End it within a few seconds; what hangs is killed."""
