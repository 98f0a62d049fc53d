"""Sequences and decoders for the learner's tests."""

import dataclasses

import numpy as np

from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.learner.batches.batches import Batch, build_batch
from hotpot.learner.estimators.advantages import Member, group_advantages
from hotpot.models import Decoder, DecoderConfig

VOCAB = 40


def make_decoder(seed: int = 0, **changes: object) -> Decoder:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "rope_theta": 1000.0,
        "initializer_range": 0.2,
        "max_context_tokens": 96,
    }
    decoder = Decoder(DecoderConfig(**{**shape, **changes}))  # type: ignore[arg-type]
    decoder.initialize(seed)
    return decoder


def make_sequence(
    issue: int = 0,
    sample: int = 0,
    *,
    reward: float = 0.0,
    segment: int = 0,
    seed: int = 0,
    system: int = 6,
    turns: int = 2,
    version: int = 3,
) -> TrainingSequence:
    """A multi-turn sequence: a system prompt shared by all, an instruction shared by the group, then turns of sampled
    tokens with a tool result between them (never after the last one)."""
    shared = np.random.default_rng(99).integers(1, VOCAB, system)
    instruction = np.random.default_rng(1000 + issue).integers(1, VOCAB, 5)
    rng = np.random.default_rng([seed, issue, sample, segment])
    pieces, mask = [shared, instruction], [False] * (system + 5)
    for turn in range(turns):
        sampled = int(rng.integers(2, 7))
        pieces.append(rng.integers(1, VOCAB, sampled))
        mask += [True] * sampled
        if turn < turns - 1:
            given = int(rng.integers(1, 5))
            pieces.append(rng.integers(1, VOCAB, given))
            mask += [False] * given
    tokens = np.concatenate(pieces).astype(np.int32)
    loss_mask = np.array(mask)
    logprobs = np.where(loss_mask, -rng.exponential(1.0, len(tokens)), 0).astype(np.float32)
    return TrainingSequence(
        trajectory_id=f"{issue}.{sample}.0",
        group_id=f"g{issue}",
        segment=segment,
        tokens=tokens,
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        model_logprobs=logprobs,
        token_policy_version=np.where(loss_mask, version, -1).astype(np.int32),
        reward=reward,
    )


def make_batch(groups: int = 3, samples: int = 4, **changes: object) -> list[TrainingSequence]:
    """Groups whose rewards alternate, so that each one has signal."""
    return [
        make_sequence(issue, sample, reward=float(sample % 2), turns=1 + (issue + sample) % 3, **changes)  # type: ignore[arg-type]
        for issue in range(groups)
        for sample in range(samples)
    ]


def batch_of(sequences: list[TrainingSequence]) -> Batch:
    """The batch of ``sequences`` with group_mean advantages."""
    members = {
        s.trajectory_id: Member(trajectory_id=s.trajectory_id, group_id=s.group_id, reward=s.reward)
        for s in sequences
    }
    return build_batch(sequences, group_advantages(list(members.values()), "group_mean"))


def fork_of(parent: TrainingSequence, number: int = 0, *, share: float = 0.6) -> TrainingSequence:
    """A fork: the parent's tokens up to a step, given and not sampled, then tokens of its own."""
    begins = np.flatnonzero(parent.loss_mask & ~np.roll(parent.loss_mask, 1))
    point = int(begins[min(int(share * len(begins)), len(begins) - 1)])
    rng = np.random.default_rng([number, point, *parent.tokens[:4].tolist()])
    tokens = np.concatenate([parent.tokens[:point], rng.integers(1, VOCAB, 5 + number)]).astype(np.int32)
    mask = np.arange(len(tokens)) >= point
    logprobs = np.where(mask, -rng.exponential(1.0, len(tokens)), 0).astype(np.float32)
    return dataclasses.replace(
        parent,
        trajectory_id=f"{parent.trajectory_id}/f{number}",
        parent=parent.trajectory_id,
        tokens=tokens,
        loss_mask=mask,
        behaviour_logprobs=logprobs,
        model_logprobs=logprobs,
        token_policy_version=np.where(mask, 3, -1).astype(np.int32),
        reward=parent.reward + 0.5,
    )
