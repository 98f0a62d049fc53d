"""vLLM's own wire: ``POST /inference/v1/generate``, token ids in and token ids out, no tokenizer between.

Owns that JSON. Beside what ``/v1/completions`` says, the answer names for each stretch of tokens the weights that sampled
it. The raw model's log-probabilities of tokens that are there already come from a second call with ``prompt_logprobs``,
which vLLM takes from the logits before any temperature or filter, whatever its ``logprobs_mode``.
"""

from collections.abc import Sequence
from typing import Any

from hotpot.engine.randomness import request_seed
from hotpot.engine.remote.wire import (
    Answer,
    Call,
    Stretch,
    WireError,
    field,
    mapping,
    numbers,
    one_choice,
    token_ids,
    usage,
)
from hotpot.types import GenerationRequest

_PATH = "/inference/v1/generate"


class GenerateWire:
    """Implements :class:`hotpot.engine.remote.wire.ScoringWire` for ``/inference/v1/generate``."""

    def __init__(self, model: str) -> None:
        self._model = model

    def call(self, request: GenerationRequest, *, max_tokens: int, salt: str) -> Call:
        """Return the call; see :meth:`hotpot.engine.remote.wire.Wire.call`."""
        sampling = request.sampling
        told = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": request_seed(request.key),
            "stop_token_ids": list(request.stop_tokens),
        }
        return self._call(request.prompt.tolist(), told, max_tokens=max_tokens, salt=salt)

    def read(self, payload: Any) -> Answer:
        """Return the answer; see :meth:`hotpot.engine.remote.wire.Wire.read`."""
        choice = one_choice(payload)
        tokens = token_ids(choice.get("token_ids"), "token_ids")
        scored = [
            mapping(one, "a log-probability")
            for one in field(mapping(choice.get("logprobs"), "logprobs"), "content", list)
        ]
        named = tuple(one.get("token_id") for one in scored)
        if named != tokens:
            raise WireError(f"token_ids are {list(tokens)[:8]} and logprobs are of {list(named)[:8]}")
        prompt, reused = usage(payload)
        return Answer(
            model=field(payload, "model", str),
            tokens=tokens,
            logprobs=numbers([one.get("logprob") for one in scored], "logprobs"),
            finish=field(choice, "finish_reason", str),
            prompt_tokens=prompt,
            reused_tokens=reused,
            stretches=_stretches(choice),
        )

    def scoring_call(self, request: GenerationRequest, tokens: Sequence[int], *, salt: str) -> Call:
        """Return the call; see :meth:`hotpot.engine.remote.wire.ScoringWire.scoring_call`."""
        told = {"temperature": 0.0, "prompt_logprobs": 0}
        return self._call([*request.prompt.tolist(), *tokens], told, max_tokens=1, salt=salt)

    def read_scores(
        self, payload: Any, tokens: Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[Stretch, ...]]:
        """Return the scores; see :meth:`hotpot.engine.remote.wire.ScoringWire.read_scores`."""
        places = field(mapping(payload, "the answer"), "prompt_logprobs", list)[-len(tokens) :]
        if len(places) != len(tokens):
            raise WireError(f"{len(places)} prompt log-probabilities for {len(tokens)} tokens")
        found = []
        for place, token in zip(places, tokens, strict=True):
            entry = mapping(place, "a prompt log-probability").get(str(token))
            found.append(mapping(entry, f"the log-probability of token {token}").get("logprob"))
        return numbers(found, "prompt_logprobs"), _stretches(one_choice(payload))

    def _call(self, prompt: list[int], told: dict[str, Any], *, max_tokens: int, salt: str) -> Call:
        always = {"max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        return Call(
            path=_PATH,
            body={
                "model": self._model,
                "token_ids": prompt,
                "cache_salt": salt,
                "sampling_params": always | told,
            },
        )


def _stretches(choice: Any) -> tuple[Stretch, ...]:
    return tuple(
        Stretch(
            label=field(one, "version", str),
            start=field(one, "start", int),
            end=field(one, "end", int),
        )
        for one in (mapping(entry, "a weight version") for entry in field(choice, "weight_versions", list))
    )
