"""Padded rows against packed ones: how fast the learner's passes are over the same sequences, in turns.

``padded`` gives each sequence a row of its own, sorted by length into passes; ``packed`` lays several end to end in a row
and masks them from each other. Both are cut by the same budget, forward and backward, and counted in true tokens. Models:
the default recipe's decoder (``tiny``) and one of SmolLM2-135M's shape with random weights (``smollm2``). Lengths: ``desk``
as the order desk's, ``spread`` log-normal between 32 and 1,024, ``tail`` mostly short with a few long.

Environment: ``ROUNDS`` (default 2), ``MODELS`` (with commas between). One thread. The last line is JSON by model and lengths:
``packed_over_padded`` (speed), ``padding_share`` of each.
"""

import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from hotpot.experience import TrainingSequence
from hotpot.learner.batches.arrangement import Packing
from hotpot.learner.batches.batches import BatchSequence, make_member
from hotpot.learner.batches.passes import MicroBatch, cut, pass_tokens
from hotpot.learner.scores.forward import score
from hotpot.models import Decoder, DecoderConfig

PACKINGS: tuple[Packing, ...] = ("padded", "packed")

MODELS = {
    "tiny": DecoderConfig(
        vocab_size=442, hidden_size=128, intermediate_size=384, num_layers=2, num_heads=4, num_kv_heads=1,
        max_context_tokens=1088,
    ),
    "smollm2": DecoderConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        max_context_tokens=1088,
    ),
}  # fmt: skip

COUNTS = {"tiny": 128, "smollm2": 6}
"""Sequences that are measured, by model."""

LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "desk": lambda rng, count: rng.integers(100, 180, count),
    "spread": lambda rng, count: np.clip(rng.lognormal(5.0, 0.9, count), 32, 1024).astype(int),
    "tail": lambda rng, count: np.where(np.arange(count) % 6 == 0, 1024, rng.integers(32, 96, count)),
}


def make_members(lengths: np.ndarray, vocab_size: int) -> list[BatchSequence]:
    """Return sequences of ``lengths`` with nothing in common, the last third of each sampled."""
    rng = np.random.default_rng(1)
    members: list[BatchSequence] = []
    for owner, length in enumerate(lengths.tolist()):
        mask = np.arange(length) >= length - length // 3
        tokens = rng.integers(1, vocab_size, length).astype(np.int32)
        tokens[0] = owner
        sequence = TrainingSequence(
            trajectory_id=str(owner),
            group_id="g",
            segment=0,
            tokens=tokens,
            loss_mask=mask,
            behaviour_logprobs=np.zeros(length, np.float32),
            model_logprobs=np.zeros(length, np.float32),
            token_policy_version=np.where(mask, 1, -1).astype(np.int32),
            reward=0.0,
        )
        start = members[-1].stop if members else 0
        members.append(make_member(sequence, advantage=1.0, owner=owner, start=start))
    return members


def learn(decoder: Decoder, micros: list[MicroBatch]) -> float:
    """Return the seconds of all passes, forward and backward."""
    started = time.perf_counter()
    for micro in micros:
        score(decoder, micro, temperature=1.0).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    decoder.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def measure(model: str, lengths: str, rounds: int) -> dict[str, float]:
    """Return speeds in true tokens a second, and the share of padding, by packing."""
    config = MODELS[model]
    decoder = Decoder(config)
    decoder.initialize(0)
    drawn = LENGTHS[lengths](np.random.default_rng(0), COUNTS[model])
    members = make_members(drawn, config.vocab_size)
    budget = pass_tokens([member.sequence for member in members], most=16384)
    micros = {packing: cut(members, max_tokens=budget, packing=packing) for packing in PACKINGS}
    seconds: dict[str, list[float]] = {packing: [] for packing in PACKINGS}
    for number in range(rounds + 1):
        for packing in PACKINGS if number % 2 else PACKINGS[::-1]:
            seconds[packing].append(learn(decoder, micros[packing]))
    true = sum(member.num_inputs for member in members)
    found: dict[str, float] = {}
    for packing in PACKINGS:
        padding = sum(micro.num_padding for micro in micros[packing])
        found[f"{packing}_tokens_per_s"] = true / statistics.median(
            seconds[packing][1:]
        )  # the first warms up
        found[f"{packing}_padding_share"] = padding / (padding + true)
    return found


def main() -> None:
    """Measure everything, print a table and the line."""
    torch.set_num_threads(1)
    rounds = int(os.environ.get("ROUNDS", "2"))
    line: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'':18}{'padded':>12}{'packed':>12}{'speed':>8}{'padding':>18}")
    for model in os.environ.get("MODELS", ",".join(MODELS)).split(","):
        for lengths in LENGTHS:
            found = measure(model, lengths, rounds)
            speed = found["packed_tokens_per_s"] / found["padded_tokens_per_s"]
            shares = [found[f"{packing}_padding_share"] for packing in PACKINGS]
            print(
                f"{model + ', ' + lengths:18}{found['padded_tokens_per_s']:12,.0f}{found['packed_tokens_per_s']:12,.0f}"
                f"{speed:8.2f}{shares[0]:9.3f}{shares[1]:9.3f}",
                flush=True,
            )
            line.setdefault(model, {})[lengths] = {
                "packed_over_padded": round(speed, 3),
                "padded_padding_share": round(shares[0], 3),
                "packed_padding_share": round(shares[1], 3),
            }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
