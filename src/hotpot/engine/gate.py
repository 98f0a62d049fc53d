"""What an engine checks before it takes a request, the same for every engine.

Owns the frozen sampling parameters, the count of refused overrides and the last of them. Knows no model and no queue.
The parameters are the gate's own copies: no object that anybody else holds can change them.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hotpot.engine.randomness import check_key
from hotpot.errors import ContextFullError, EngineError, SamplingOverrideError
from hotpot.types import GenerationRequest, Purpose, SamplingOverride, SamplingParams

NUM_KEPT = 16
"""Refused overrides that a gate keeps the particulars of, the last ones; all are counted."""


class RequestGate:
    """Admits requests an engine can serve; refuses the others, each with the value, the rule and the remedy.

    Parameters
    ----------
    sampling: the frozen parameters of each purpose the engine serves.
    vocab_size: ids run from 0 to this, exclusive.
    max_context_tokens: prompt and sampled tokens together.

    ``overrides`` counts the requests refused for their sampling parameters, by purpose, since the gate was made.
    """

    def __init__(
        self, sampling: Mapping[Purpose, SamplingParams], *, vocab_size: int, max_context_tokens: int
    ) -> None:
        self.sampling = {purpose: replace(params) for purpose, params in sampling.items()}
        self.overrides: Counter[Purpose] = Counter()
        self._refused: deque[SamplingOverride] = deque(maxlen=NUM_KEPT)
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens

    def check(self, request: GenerationRequest) -> None:
        """Raise :class:`SamplingOverrideError` or :class:`EngineError` where ``request`` cannot be served as asked."""
        name = f"request {request.request_id!r}"
        self._check_sampling(request, name)
        self._check_prompt(request, name)
        if request.max_tokens <= 0:
            raise EngineError(
                f"{name}: max_tokens is {request.max_tokens}; it must be at least 1: ask for a token or do not ask"
            )
        unknown = [token for token in request.stop_tokens if not 0 <= token < self.vocab_size]
        if unknown:
            raise EngineError(
                f"{name}: stop token {unknown[0]} is outside the vocabulary of {self.vocab_size}; "
                "use the tokenizer that belongs to the model"
            )
        try:
            check_key(request.key)
        except ValueError as error:
            raise EngineError(f"{name}: {error}") from None

    def take_overrides(self) -> tuple[SamplingOverride, ...]:
        """Return the overrides refused since this was asked last, the last :data:`NUM_KEPT` of them at most."""
        found = tuple(self._refused)
        self._refused.clear()
        return found

    def _check_sampling(self, request: GenerationRequest, name: str) -> None:
        frozen = self.sampling.get(request.purpose)
        if frozen is None:
            raise EngineError(
                f"{name}: this engine has no sampling parameters for purpose {request.purpose.value!r} "
                f"(it has {sorted(p.value for p in self.sampling)}); name them when the engine is made"
            )
        if request.sampling != frozen:
            self.overrides[request.purpose] += 1
            self._refused.append(
                SamplingOverride(
                    request_id=request.request_id,
                    session_id=request.session_id,
                    sender=request.sender,
                    purpose=request.purpose,
                    asked=request.sampling,
                    frozen=frozen,
                )
            )
            raise SamplingOverrideError(
                f"{name} of session {request.session_id!r} (sender: {request.sender or 'not named'}) asks for "
                f"{request.sampling} but {request.purpose.value} is frozen at {frozen}; "
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
        if prompt.size >= self.max_context_tokens:
            raise ContextFullError(
                f"{name}: the prompt has {prompt.size} tokens and the context holds {self.max_context_tokens}, which leaves "
                "no room to sample one; end the episode, or raise rollout.max_context_tokens"
            )
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self.vocab_size:
            raise EngineError(
                f"{name}: token {low if low < 0 else high} is outside the vocabulary of {self.vocab_size}; "
                "use the tokenizer that belongs to the model"
            )
