"""The process of the version proof: topology_kill_worker.py with an engine that serves toy weights of each version.

The learner goes its own way; what the run publishes as version v is replaced by the toy weights of v's number, so that
each recorded log-probability tells the version that was really served.
"""

import runpy
from pathlib import Path
from typing import Any

from hotpot.config import Recipe
from hotpot.models import Decoder, Policy, PolicyTokenizer
from hotpot.rollout import Dialect
from hotpot.testing.toy_weights import ToyModel, number_of
from hotpot.topology import wiring
from hotpot.topology.parts.engines import make_engine


def toy_model(folder: Path, vocab_size: int, max_context_tokens: int) -> ToyModel:
    """Return the toy model that goes with the tokenizer in ``folder``."""
    stop_tokens = Dialect(PolicyTokenizer.load(folder)).stop_tokens
    return ToyModel(
        vocab_size=vocab_size, max_context_tokens=max_context_tokens, stop_tokens=stop_tokens, stop_share=0.12
    )


def serve(recipe: Recipe, policy: Policy, sampling: Any, version: int) -> Any:
    """Return an engine as the recipe wants it, of the toy model."""
    toy = toy_model(recipe.model.path, policy.config.vocab_size, recipe.rollout.max_context_tokens)
    model = Decoder(toy.config)
    model.load_state_dict(dict(toy.weights(number_of(version))))
    engine = make_engine(recipe, model, sampling, version)
    publish = engine.publish
    engine.publish = lambda _weights, new: publish(toy.weights(number_of(new)), new)  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    wiring.make_engine = serve  # type: ignore[assignment]
    runpy.run_path(str(Path(__file__).with_name("topology_kill_worker.py")), run_name="__main__")
