"""The wire of OpenAI-compatible servers: ``POST /v1/completions`` with a list of token ids as the prompt.

Owns that JSON. The fields beyond OpenAI's own are what vLLM, SGLang and TensorRT-LLM name alike where they have them: stop
token ids, ``ignore_eos``, top-k and repetition penalty. Sampled ids come back as ``token_ids`` or as texts ``token_id:N``;
a server that gives neither cannot be an engine, since text encoded again is not what was sampled.
"""

from typing import Any

from hotpot.engine.randomness import request_seed
from hotpot.engine.remote.wire import (
    Answer,
    Call,
    WireError,
    field,
    mapping,
    numbers,
    one_choice,
    token_ids,
    usage,
)
from hotpot.types import GenerationRequest

_PREFIX = "token_id:"


class CompletionsWire:
    """Implements :class:`hotpot.engine.remote.wire.Wire` for ``/v1/completions``.

    ``salted`` says whether the server knows ``cache_salt``; many refuse a field they do not know.
    """

    def __init__(self, model: str, *, salted: bool) -> None:
        self._model = model
        self._salted = salted

    def call(self, request: GenerationRequest, *, max_tokens: int, salt: str) -> Call:
        """Return the call; see :meth:`hotpot.engine.remote.wire.Wire.call`."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt.tolist(),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": request_seed(request.key),
            "stop_token_ids": list(request.stop_tokens),
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if self._salted:
            body["cache_salt"] = salt
        return Call(path="/v1/completions", body=body)

    def read(self, payload: Any) -> Answer:
        """Return the answer; see :meth:`hotpot.engine.remote.wire.Wire.read`."""
        choice = one_choice(payload)
        scored = mapping(choice.get("logprobs"), "logprobs")
        named = _named(field(scored, "tokens", list))
        ids = choice.get("token_ids")
        tokens = named if ids is None else token_ids(ids, "token_ids")
        if tokens is None:
            raise WireError(
                "the answer has neither token_ids nor tokens of the form token_id:N; the server must return the ids it "
                "sampled (docs/engines.md)"
            )
        if named is not None and named != tokens:
            raise WireError(f"token_ids are {list(tokens)[:8]} and logprobs.tokens say {list(named)[:8]}")
        prompt, reused = usage(payload)
        return Answer(
            model=field(payload, "model", str),
            tokens=tokens,
            logprobs=numbers(field(scored, "token_logprobs", list), "token_logprobs"),
            finish=field(choice, "finish_reason", str),
            prompt_tokens=prompt,
            reused_tokens=reused,
        )


def _named(texts: list[Any]) -> tuple[int, ...] | None:
    """Return the ids in texts ``token_id:N``, None where the texts are words."""
    if not all(isinstance(text, str) and text.startswith(_PREFIX) for text in texts):
        return None
    try:
        return tuple(int(text.removeprefix(_PREFIX)) for text in texts)
    except ValueError:
        return None
