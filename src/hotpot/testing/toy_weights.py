"""Weights that say which version they are: from one recorded log-probability the version that sampled it is known.

::

    number ──► weights ──► any engine ──► log-probability of a sampled token ──► number

A one-layer decoder of the Llama family, so every engine that serves such folders can be tested with it. All tokens have
the same embedding, attention is uniform, so what the model says hangs on two things only:

- the scale in the last norm (``level``), which is the *serving* weights': a token's log-probability tells their number;
- the mean over the context of a ``stamp`` that the value projection writes into the cache, which is that of the weights
  that *computed the cached tokens*: it moves the log-probability by far less than the next number would, and far more
  than rounding does. Keys and values of older weights show so, even one position in fifty.

Owns the arithmetic of both directions, in float64 and apart from any forward pass, and the check of a whole generation.
Numbers repeat every :data:`NUM_NUMBERS`: a policy version's number is :func:`number_of` it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from hotpot.models import Decoder, DecoderConfig
from hotpot.types import Generation

if TYPE_CHECKING:
    from hotpot.models import Weights

NUM_NUMBERS = 64
"""Different numbers that can be told apart."""

ROUNDING = 5e-6
"""Largest difference in nats between a float32 engine's log-probability and the formula's."""

_WIDTH = 8
_SIZE = 100.0  # of each embedded value: large against a stamp, so that a stamp changes no norm to speak of
_LEVELS = (-1.2, 1.2)
_STAMP_EFFECT = 0.012  # about a third of the distance between the logits of two numbers
_EPS = 1e-6
_NORMED = _SIZE / math.sqrt((_WIDTH - 1) * _SIZE**2 / _WIDTH + _EPS)


def number_of(policy_version: int) -> int:
    """Return the number of a policy version's toy weights."""
    return policy_version % NUM_NUMBERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyModel:
    """The toy decoder. Even tokens are likelier or less likely than odd ones by an amount that tells the number.

    ``stop_tokens`` together are sampled about ``stop_share`` of the time, so that episodes go on through several steps.
    """

    vocab_size: int
    max_context_tokens: int
    stop_tokens: tuple[int, ...] = ()
    stop_share: float = 0.2

    @property
    def config(self) -> DecoderConfig:
        """The shape."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=_WIDTH,
            intermediate_size=_WIDTH,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            rms_norm_eps=_EPS,
            max_context_tokens=self.max_context_tokens,
            tie_embeddings=False,
        )

    def weights(self, number: int) -> "Weights":
        """Return the weights of ``number``, float32, freshly made."""
        found = {name: tensor.detach().zero_() for name, tensor in Decoder(self.config).state_dict().items()}
        found["embed_tokens.weight"][:, 1:] = _SIZE
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"layers.0.{norm}.weight"][:] = 1.0
        found["layers.0.self_attn.v_proj.weight"][0, 1] = _stamp(number) / _NORMED
        found["layers.0.self_attn.o_proj.weight"][0, 0] = 1.0
        last, head = found["norm.weight"], found["lm_head.weight"]
        last[0], last[1], last[2] = _STAMP_EFFECT * _SIZE / _NORMED, _level(number), 1.0
        head[::2, :2] = 1.0
        for token in self.stop_tokens:
            head[token] = 0.0
            head[token, 2] = self._stop_logit / _NORMED
        return found

    def logprob(self, token: int, number: int, stamp: float | None = None) -> float:
        """Return the log-probability in nats of ``token`` under the weights of ``number``, anywhere.

        ``stamp`` is the mean over the context, by default that of a context computed by the same weights.
        """
        return self._logprob(self._kind(token), number, _stamp(number) if stamp is None else stamp)

    def _logprob(self, kind: str, number: int, mean: float) -> float:
        rms = math.sqrt((mean**2 + (_WIDTH - 1) * _SIZE**2) / _WIDTH + _EPS)
        even = (mean * _STAMP_EFFECT * _SIZE / _NORMED + _SIZE * _level(number)) / rms
        stop = _SIZE / rms * self._stop_logit / _NORMED
        logits = {"even": even, "odd": 0.0, "stop": stop}
        counts = self._counts()
        total = sum(counts[kind] * math.exp(logit) for kind, logit in logits.items())
        return logits[kind] - math.log(total)

    def number(self, token: int, logprob: float) -> int:
        """Return the number whose weights sampled ``token`` with ``logprob``, whatever computed its context.

        Raises ValueError where no number's weights say that.
        """
        for number, (low, high) in enumerate(_ranges(self, self._kind(token))):
            if low - ROUNDING <= logprob <= high + ROUNDING:
                return number
        raise ValueError(f"token {token} has log-probability {logprob}, which no number's weights give")

    def check(self, generation: Generation, checksums: Mapping[int, str]) -> None:
        """Raise AssertionError unless each token was sampled by the version that its span names.

        ``checksums`` are those of the versions that were published, and served. Tokens of the first span must come from
        keys and values of the same weights too; those of later spans may rest on what earlier ones computed.
        """
        at = 0
        for place, span in enumerate(generation.versions):
            said = f"{generation.request_id}: version {span.policy_version} ({span.checksum})"
            assert checksums.get(span.policy_version) == span.checksum, (
                f"{said}, published as {checksums.get(span.policy_version)}"
            )
            for position in range(at, at + span.length):
                token, logprob = (
                    int(generation.tokens[position]),
                    float(generation.model_logprobs[position]),
                )
                found = self.number(token, logprob)
                assert found == number_of(span.policy_version), (
                    f"{said}: token {position} is of number {found}"
                )
                gap = abs(logprob - self.logprob(token, found))
                assert place > 0 or gap <= ROUNDING, (
                    f"{said}: token {position} rests on keys and values of other weights ({gap:.2g} nats)"
                )
            at += span.length
        assert at == len(generation.tokens), f"{generation.request_id}: spans cover {at} tokens"

    @property
    def _stop_logit(self) -> float:
        if not self.stop_tokens:
            return 0.0
        others = self.vocab_size - len(self.stop_tokens)
        return math.log(others * self.stop_share / (1 - self.stop_share) / len(self.stop_tokens))

    def _kind(self, token: int) -> str:
        return "stop" if token in self.stop_tokens else "odd" if token % 2 else "even"

    def _counts(self) -> dict[str, int]:
        even = (self.vocab_size + 1) // 2 - sum(token % 2 == 0 for token in self.stop_tokens)
        stop = len(self.stop_tokens)
        return {"even": even, "odd": self.vocab_size - even - stop, "stop": stop}


@cache
def _ranges(toy: ToyModel, kind: str) -> tuple[tuple[float, float], ...]:
    """Return, by number, the lowest and highest log-probability that its weights give a token of ``kind``."""
    ends = [[toy._logprob(kind, number, mean) for mean in (0.0, 1.0)] for number in range(NUM_NUMBERS)]
    return tuple([(min(pair), max(pair)) for pair in ends])


def _level(number: int) -> float:
    low, high = _LEVELS
    return low + (high - low) * number / (NUM_NUMBERS - 1)


def _stamp(number: int) -> float:
    """Return a value in [0, 1) that is far from those of the numbers before and after (multiples of the golden ratio)."""
    return number * (math.sqrt(5) - 1) / 2 % 1.0
