"""Memory and time of one forward and backward pass under the ways to compute it: 8 layers of 256, 4,096 tokens.

Each way runs in a process of its own; ``peak_mib`` is the most memory it had resident above what it had before the pass
(weights, not their gradients). Prints one line each, the last line is all of it as JSON. Where products of bfloat16 are
emulated they are left out: a pass takes minutes.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from hotpot.config.sections import LearnerSection
from hotpot.experience import TrainingSequence
from hotpot.learner.batches.batches import make_member
from hotpot.learner.batches.passes import lay_out
from hotpot.learner.parts import Parts
from hotpot.learner.precision import native_bfloat16
from hotpot.learner.scores.forward import score
from hotpot.models import Decoder, DecoderConfig

ROWS, LENGTH, VOCABULARY = 8, 512, 1024
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"lora_rank": 8},
    "lora_checkpointed": {"lora_rank": 8, "gradient_checkpointing": True},
    "bfloat16": {"precision": "bfloat16", "old_logprobs": "recomputed"},
    "bfloat16_checkpointed": {
        "precision": "bfloat16", "old_logprobs": "recomputed", "gradient_checkpointing": True,
    },
}  # fmt: skip


def sequence(number: int) -> TrainingSequence:
    """A sequence of LENGTH tokens that is learned from in its second half."""
    mask = np.arange(LENGTH + 1) >= LENGTH // 2
    zeros = np.zeros(LENGTH + 1, np.float32)
    return TrainingSequence(
        trajectory_id=str(number),
        group_id="g",
        segment=0,
        tokens=np.random.default_rng(number).integers(1, VOCABULARY, LENGTH + 1).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=zeros,
        model_logprobs=zeros,
        token_policy_version=np.where(mask, 1, -1).astype(np.int32),
        reward=0.0,
    )


def resident_mib() -> float:
    """Return what the process has resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(way: str) -> dict[str, float]:
    """Return what one pass takes, computed in this process, and the time of a second one."""
    decoder = Decoder(
        DecoderConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_layers=8, num_heads=8, num_kv_heads=2,
            max_context_tokens=LENGTH,
        )
    )  # fmt: skip
    decoder.initialize(0)
    parts = Parts(decoder, LearnerSection.model_validate(WAYS[way]), reference=None, seed=0)
    members, start = [], 0
    for number in range(ROWS):
        members.append(make_member(sequence(number), advantage=1.0, owner=number, start=start))
        start = members[-1].stop
    micro = lay_out([[member] for member in members], prefix=0)
    assert micro.tokens.size == ROWS * LENGTH

    def once() -> float:
        began = time.perf_counter()
        score(parts.policy, micro, temperature=1.0).logprobs.mean().backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - began

    before = resident_mib()
    once()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    learning = sum(value.numel() for _, value in parts.learning())
    return {"peak_mib": round(peak, 1), "seconds": round(once(), 2), "parameters_learning": learning}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        print(json.dumps(measure(sys.argv[1])))
    else:
        # What is freed goes back to the system, so that the peak is of what is held.
        surroundings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
        found = {}
        for name in WAYS:
            if "bfloat16" in name and not native_bfloat16():
                continue
            out = subprocess.run(
                [sys.executable, __file__, name], check=True, capture_output=True, text=True, env=surroundings
            ).stdout
            found[name] = json.loads(out)
            print(name, found[name])
        print(json.dumps(found))
