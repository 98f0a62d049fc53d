"""How many tokens a pass may hold, and what happens where one runs out of memory: half of it, once, and said so.

Owns the bound, its one halving in a learner's life, and what counts as running out of memory. Knows no model: what is
tried is given to it, is told how many tokens its passes may hold, and must begin anew each time it is called.

Invariants: the bound never falls below the longest sequence and never rises again; at a halving that is known beforehand
(from the record of an update) passes are cut as they were then, whether memory runs out or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from hotpot.errors import LearnerError
from hotpot.experience import TrainingSequence
from hotpot.learner.batches.passes import pass_tokens

Result = TypeVar("Result")

Stage = Literal["divergences", "values", "starting", "first_pass", "reference", "step"]
"""What is computed in passes: the reference's part in the reward, the critic's values, the log-probabilities that V-trace's
ratios are of, those before the first step, the reference's, and a step itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halving:
    """Where within an update the bound was halved: before ``step`` (optimiser steps begun, from 0; 0 in other stages).

    ``tokens_before`` and ``tokens_after``: what a pass was allowed to hold there; the latter is more than half where the
    longest sequence is.
    """

    stage: Stage
    step: int
    tokens_before: int
    tokens_after: int


class PassBudget:
    """The bound of a learner that its recipe allows ``most`` tokens a pass.

    ``limit``: what was left by a halving, 0 before there was one. ``carried``: the limit as the update in hand began;
    ``halving``: the one that happened in it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = self.carried = 0
        self.halving: Halving | None = None
        self._planned: Halving | None = None

    def begin(self, planned: Halving | None) -> None:
        """Begin an update; ``planned`` is the halving that its record tells of, None where it tells of none."""
        self.carried, self.halving, self._planned = self.limit, None, planned

    def pass_tokens(self, sequences: Sequence[TrainingSequence]) -> int:
        """Return the largest padded size of a pass over ``sequences``, in tokens."""
        return self._bound(pass_tokens(sequences, most=self.most), longest(sequences))

    def attempt(
        self,
        work: Callable[[int], Result],
        *,
        stage: Stage,
        sequences: Sequence[TrainingSequence],
        step: int = 0,
        tokens: int | None = None,
    ) -> Result:
        """Return what ``work`` returns of the tokens a pass over ``sequences`` may hold; call it again with half of them
        where it runs out of memory. ``tokens``: what it may hold unless halved, by default :meth:`pass_tokens`.

        Raises :class:`LearnerError` where that was not the first time, or the longest sequence needs more than half.
        """
        whole = pass_tokens(sequences, most=self.most) if tokens is None else tokens
        floor = longest(sequences)
        planned = self._planned
        if planned is not None and not self.limit and (planned.stage, planned.step) == (stage, step):
            self._halve(planned.tokens_before, floor, stage, step)
        while True:
            bound = self._bound(whole, floor)
            try:
                return work(bound)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if self.limit or self._smaller(bound, floor) >= bound:
                    raise LearnerError(self._refusal(error, bound, floor, stage)) from error
            # Behind the handler: the traceback, which keeps the tensors of the pass alive, is gone.
            self._halve(bound, floor, stage, step)

    def _halve(self, tokens: int, floor: int, stage: Stage, step: int) -> None:
        self.limit = max(tokens // 2, 1)
        self.halving = Halving(
            stage=stage, step=step, tokens_before=tokens, tokens_after=self._smaller(tokens, floor)
        )

    def _bound(self, tokens: int, floor: int) -> int:
        return tokens if not self.limit else max(min(tokens, self.limit), min(tokens, floor))

    def _smaller(self, tokens: int, floor: int) -> int:
        return max(tokens // 2, floor)

    def _refusal(self, error: BaseException, tokens: int, floor: int, stage: Stage) -> str:
        tried = (
            f"passes were halved before, to {self.limit} tokens, and are halved once only"
            if self.limit
            else f"they can't be halved, since the longest sequence has {floor} tokens"
        )
        remedy = (
            f"set learner.micro_batch_tokens below {tokens}"
            if floor < tokens
            else f"set learner.segment_tokens below {floor}, which cuts sequences"
        )
        return (
            f"a pass of at most {tokens} tokens ran out of memory ({stage}: {str(error).splitlines()[0][:200]}); {tried}: "
            f"{remedy}, or give the process more memory, and resume the run"
        )


def longest(sequences: Sequence[TrainingSequence]) -> int:
    """Return the tokens of the longest of ``sequences``, which a pass must hold; 0 of none."""
    return max((len(sequence.tokens) for sequence in sequences), default=0)


def out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory ran out: an accelerator's, or the allocator's of the processor.

    torch has a class for the former only; of the latter it says ``DefaultCPUAllocator: can't allocate memory`` (with
    ``not enough memory`` on Windows).
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "DefaultCPUAllocator" in str(error) and "memory" in str(error)
