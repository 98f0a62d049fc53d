"""What an engine checks before it takes a request, the same for every engine.

Owns the frozen sampling parameters and the count of refused overrides. Knows no model and no queue.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from hotpot.engine.randomness import check_key
from hotpot.errors import ContextFullError, EngineError, SamplingOverrideError
from hotpot.types import GenerationRequest, Purpose, SamplingParams


class RequestGate:
    """Admits requests an engine can serve; refuses the others, each with the value, the rule and the remedy.

    Parameters
    ----------
    sampling: the frozen parameters of each purpose the engine serves.
    vocab_size: ids run from 0 to this, exclusive.
    max_context_tokens: prompt and sampled tokens together.
    """

    def __init__(
        self, sampling: Mapping[Purpose, SamplingParams], *, vocab_size: int, max_context_tokens: int
    ) -> None:
        self.sampling = dict(sampling)
        self.overrides: Counter[Purpose] = Counter()
        self._vocab_size = vocab_size
        self._max_context = max_context_tokens

    def check(self, request: GenerationRequest) -> None:
        """Raise :class:`SamplingOverrideError` or :class:`EngineError` where ``request`` cannot be served as asked."""
        name = f"request {request.request_id!r}"
        self._check_sampling(request, name)
        self._check_prompt(request, name)
        if request.max_tokens <= 0:
            raise EngineError(
                f"{name}: max_tokens is {request.max_tokens}; it must be at least 1: ask for a token or do not ask"
            )
        unknown = [token for token in request.stop_tokens if not 0 <= token < self._vocab_size]
        if unknown:
            raise EngineError(
                f"{name}: stop token {unknown[0]} is outside the vocabulary of {self._vocab_size}; "
                "use the tokenizer that belongs to the model"
            )
        try:
            check_key(request.key)
        except ValueError as error:
            raise EngineError(f"{name}: {error}") from None

    def _check_sampling(self, request: GenerationRequest, name: str) -> None:
        frozen = self.sampling.get(request.purpose)
        if frozen is None:
            raise EngineError(
                f"{name}: this engine has no sampling parameters for purpose {request.purpose.value!r} "
                f"(it has {sorted(p.value for p in self.sampling)}); name them when the engine is made"
            )
        if request.sampling != frozen:
            self.overrides[request.purpose] += 1
            raise SamplingOverrideError(
                f"{name} asks for {request.sampling} but {request.purpose.value} is frozen at {frozen}; "
                "change the recipe's [sampling] section, never a single request"
            )

    def _check_prompt(self, request: GenerationRequest, name: str) -> None:
        prompt = request.prompt
        if prompt.ndim != 1 or prompt.dtype != np.int32:
            raise EngineError(
                f"{name}: the prompt is {prompt.dtype} {list(prompt.shape)}; give int32 of one dimension"
            )
        if prompt.size == 0:
            raise EngineError(f"{name}: the prompt is empty; give at least one token")
        if prompt.size >= self._max_context:
            raise ContextFullError(
                f"{name}: the prompt has {prompt.size} tokens and the context holds {self._max_context}, which leaves "
                "no room to sample one; end the episode, or raise rollout.max_context_tokens"
            )
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self._vocab_size:
            raise EngineError(
                f"{name}: token {low if low < 0 else high} is outside the vocabulary of {self._vocab_size}; "
                "use the tokenizer that belongs to the model"
            )
