"""Fills an engine's memory with far more than its budget and prints what the process really took; run by a test.

Arguments: budget in MiB. Last line: JSON with bytes of keys and values that were computed in all, and the growth of the
process's resident memory at its highest.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.engine.embedded.store import block_bytes
from hotpot.models import Decoder, DecoderConfig
from hotpot.types import GenerationRequest, Purpose, SampleKey, SamplingParams


def resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(budget: int) -> None:
    torch.set_num_threads(1)
    config = DecoderConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_layers=2, num_heads=16, num_kv_heads=16,
        head_dim=64, max_context_tokens=1024,
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.initialize(0)
    sampling = SamplingParams()
    engine = EmbeddedEngine(
        config,
        {name: parameter.detach() for name, parameter in decoder.named_parameters()},
        settings=EngineSection(kv_cache_bytes=budget, max_concurrency=64, prefill_tokens=512),
        max_context_tokens=1024,
        sampling={Purpose.TRAINING: sampling},
    )
    rng = np.random.default_rng(0)
    before, tokens = resident("VmRSS"), 0
    for number in range(120):
        prompt = rng.integers(0, 50, int(rng.integers(300, 900))).astype(np.int32)
        tokens += len(prompt) + 8
        request = GenerationRequest(
            request_id=str(number),
            session_id=str(number),
            prompt=prompt,
            stop_tokens=(),
            max_tokens=8,
            purpose=Purpose.TRAINING,
            sampling=sampling,
            key=SampleKey(seed=0, issue=number, sample=0, step=0),
        )
        engine.submit(request)
    answered = 0
    while not engine.idle:
        answered += len(engine.step())
    size = block_bytes([(16, 64)] * 2) // 32
    found = {"answered": answered, "needed": tokens * size, "grown": resident("VmHWM") - before}
    sys.stdout.write(json.dumps({**found, "evictions": engine.usage.evictions}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) << 20)
