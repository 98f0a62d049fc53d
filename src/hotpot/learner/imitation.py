"""Supervised warm start: cross-entropy on the tokens a demonstrator said, and on no others.

Owns the optimiser loop of imitation. Knows no environment: it is given finished sequences, as the policy-gradient
learner is, and lays them out with the same code.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from hotpot.config.sections import WarmstartSection
from hotpot.errors import LearnerError
from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.learner.batches.batches import BatchSequence, make_member
from hotpot.learner.batches.passes import lay_out
from hotpot.learner.scores.forward import score
from hotpot.models import Policy


def imitate(
    decoder: Policy, batches: Iterable[Sequence[TrainingSequence]], settings: WarmstartSection
) -> list[float]:
    """Train ``decoder`` in place, one AdamW step a batch; return the loss of each, in nats per loss token.

    The learning rate rises linearly over a tenth of ``settings.steps``, stays, and falls over the last quarter to a tenth
    of its peak: copying is learned at once, at some step while the rate is high.
    Raises :class:`LearnerError` on a loss or gradient that is not finite, before it reaches the weights.
    """
    optimizer = torch.optim.AdamW(
        decoder.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
    )
    losses: list[float] = []
    decoder.train()
    for step, sequences in enumerate(batches):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * _schedule(step, settings.steps)
        loss = -score(
            decoder, lay_out([[member] for member in _members(sequences)]), temperature=1.0
        ).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(decoder.parameters(), settings.max_grad_norm))
        losses.append(loss.item())
        if not (math.isfinite(losses[-1]) and math.isfinite(norm)):
            raise LearnerError(
                f"warm start: step {step} has loss {losses[-1]:g} and gradient norm {norm:g}; both must be finite: "
                f"lower warmstart.learning_rate (now {settings.learning_rate:g})"
            )
        optimizer.step()
    decoder.eval()
    return losses


def _schedule(step: int, steps: int) -> float:
    """Return the rate's share of its peak: up over a tenth, level, down over the last quarter to a tenth."""
    warmup, fall = max(1, steps // 10), max(1, steps // 4)
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, 0.1 + 0.9 * (steps - step) / fall)


def _members(sequences: Sequence[TrainingSequence]) -> list[BatchSequence]:
    members: list[BatchSequence] = []
    for owner, sequence in enumerate(sequences):
        start = members[-1].stop if members else 0
        members.append(make_member(sequence, advantage=1.0, owner=owner, start=start))
    return members
