"""Learning in the main loop: what is begun is done at once.

Owns when the learner is called, on how many threads, and what it came to. Knows no process.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotpot.errors import LearnerError
from hotpot.experience.crashpoints import reach
from hotpot.learner import Learner
from hotpot.models import Weights, checksum, copy_weights, use_threads
from hotpot.topology.learning.protocol import TOLD, Learned, Work


class InlineLearning:
    """:class:`hotpot.topology.learning.protocol.Learning` of a learner in this process, on ``num_threads`` threads.

    What the learner raises on purpose, or for want of memory, is raised by :meth:`poll`, as it is where learning has a
    process of its own; anything else at once.
    """

    def __init__(self, learner: Learner, *, num_threads: int) -> None:
        self._learner, self._num_threads = learner, num_threads
        self._outcome: Learned | Path | Exception | None = None
        self._made: Weights | None = None
        self._weights: Weights | None = None
        self._done, self._last = 0, time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether something was begun whose end was not taken by :meth:`poll` yet."""
        return self._outcome is not None

    def begin(self, work: Work) -> None:
        """Learn. Raises :class:`LearnerError` where the end of the last work was not taken yet."""
        self._do(lambda: self._learn(work))

    def begin_save(self, folder: Path, files: Mapping[str, bytes], run: Mapping[str, Any]) -> None:
        """Write a checkpoint into ``folder``, as :meth:`hotpot.learner.Learner.save` does. Raises as :meth:`begin`."""

        def save() -> Path:
            self._learner.save(folder, files, run)
            return folder

        self._do(save)

    def poll(self, timeout_s: float = 0.0) -> Learned | Path | None:
        """Return what came of the work, None where none was begun; nothing is waited for. Raises what the learner raised."""
        del timeout_s
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, Learned):
            self._weights = self._made
        return outcome

    def weights(self) -> Weights:
        """Return a copy of the weights as they were after the last update that :meth:`poll` gave.

        Raises :class:`LearnerError` before the first.
        """
        if self._weights is None:
            raise LearnerError(
                "no update was learned here yet; take the weights from where the learner began"
            )
        return self._weights

    def beat(self) -> tuple[int, float]:
        """Return how much was done here so far, and when last, on the monotonic clock."""
        return self._done, self._last

    def close(self) -> None:
        """Nothing is left behind."""

    def _do(self, what: Callable[[], Learned | Path]) -> None:
        if self._outcome is not None:
            raise LearnerError("the learner was given work before the end of the last was taken; poll first")
        use_threads(self._num_threads)
        try:
            self._outcome = what()
        except TOLD as error:
            self._outcome = error
        self._done, self._last = self._done + 1, time.monotonic()

    def _learn(self, work: Work) -> Learned:
        reach("learning_began")
        began = time.perf_counter()
        result = self._learner.update(
            work.sequences, update=work.update, policy_version=work.policy_version, peers=work.peers
        )
        reach("learning_ended")
        weights = copy_weights(self._learner.weights())
        self._made = weights
        return Learned(result=result, seconds=time.perf_counter() - began, checksum=checksum(weights))
