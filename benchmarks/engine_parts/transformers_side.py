"""transformers' side: ``generate_batch``, its continuous batching, with its blocks shared between requests as it does by default.

The manager with its cache lives on from round to round; it is sized by its first, which warms up and is as long as the others. Lengths are exact: no token ends a generation. Log-probabilities are
asked for, since ours come with every token.
"""

import sys
import time
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine_parts.processes import serve
from engine_parts.work import BatchSizes, Text, batch
from hotpot.models import PolicyTokenizer

WARM = 1_000_000


class TransformersSide:
    """A model of transformers with one of its settings: folder, threads, batching (its configuration), sizes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        getLogger("ContinuousBatchingLogger").setLevel(
            "ERROR"
        )  # it warns that a manager that is kept was sized once
        folder = Path(settings["folder"])
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.text = Text(PolicyTokenizer.load(folder))
        self.sizes = BatchSizes(**settings["sizes"])
        self.generation = GenerationConfig(
            max_new_tokens=self.sizes.sampled,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=-1,
            pad_token_id=0,
        )
        self.batching = ContinuousBatchingConfig(return_logprobs=True, **settings["batching"])

    def __call__(self, told: dict[str, Any]) -> dict[str, Any]:
        """Do what is told; return what it took."""
        warm = told["do"] == "warm"
        prompts = batch(self.text, self.sizes, WARM if warm else int(told["number"]))
        started = time.perf_counter()
        answers = self.model.generate_batch(
            prompts,
            generation_config=self.generation,
            continuous_batching_config=self.batching,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - started
        lengths = [len(answer.generated_tokens) for answer in answers.values()]
        assert lengths == [self.sizes.sampled] * len(prompts), (
            f"{lengths} tokens where {self.sizes.sampled} were asked for"
        )
        return {"seconds": seconds, "sampled": sum(lengths)}


if __name__ == "__main__":
    serve(TransformersSide)
