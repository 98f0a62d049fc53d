"""A process that learns one update in a bounded address space: ``python learner_memory_worker.py '{"gap_bytes": …}'``.

``gap_bytes``: how much the process may map beyond what it has when the update begins, null for no bound.
``micro_batch_tokens``: as in a recipe. ``state``: a recorded state whose halving is done again. The last line is JSON.
"""

import json
import re
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from hotpot.config.sections import LearnerSection
from hotpot.experience import TrainingSequence
from hotpot.learner import Learner, recorded_halving
from hotpot.models import Decoder, DecoderConfig, checksum

LENGTH, VOCABULARY = 128, 8192
"""Most of a pass's memory are its logits: 32 KiB a loss token, several times."""


def sequences(groups: int) -> list[TrainingSequence]:
    """Pairs of sequences that are learned from in three quarters of their tokens, one of each pair rewarded."""
    mask = np.arange(LENGTH) >= LENGTH // 4
    found = []
    for number in range(2 * groups):
        rng = np.random.default_rng(number)
        logprobs = np.where(mask, rng.normal(-9.4, 0.1, LENGTH), 0).astype(np.float32)
        found.append(
            TrainingSequence(
                trajectory_id=str(number),
                group_id=str(number // 2),
                segment=0,
                tokens=rng.integers(1, VOCABULARY, LENGTH).astype(np.int32),
                loss_mask=mask,
                behaviour_logprobs=logprobs,
                model_logprobs=logprobs,
                token_policy_version=np.where(mask, 1, -1).astype(np.int32),
                reward=float(number % 2),
            )
        )
    return found


def mapped(name: str) -> int:
    """Return the bytes that the process maps now (``VmSize``), or has mapped at most (``VmPeak``)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main(told: dict[str, object]) -> dict[str, object]:
    """Learn as ``told``; return what came of it."""
    torch.set_num_threads(1)
    decoder = Decoder(
        DecoderConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
            max_context_tokens=LENGTH,
        )
    )  # fmt: skip
    decoder.initialize(0)
    settings = LearnerSection(minibatches=1, micro_batch_tokens=told["micro_batch_tokens"], max_grad_norm=1e9)
    learner = Learner(decoder, settings, total_updates=2, seed=0, temperature=1.0)
    # Moments and the buffers of matrix products are there before memory is short.
    learner.update(sequences(1), update=1, policy_version=1)
    begin = mapped("VmSize")
    if told["gap_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (begin + told["gap_bytes"], resource.RLIM_INFINITY))
    result = learner.update(
        sequences(8), update=2, policy_version=2, halving=recorded_halving(told["state"] or "")
    )
    halving = result.terms.halving
    return {
        "peak_bytes": mapped("VmPeak") - begin,
        "state": result.terms.state,
        "halving": None if halving is None else [halving.stage, halving.step, halving.tokens_before, halving.tokens_after],
        "losses": result.losses.tolist(),
        "grad_norms": result.grad_norms.tolist(),
        "weights": checksum(learner.weights()),
        "step_hashes": [step.hash for step in result.steps],
    }  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
