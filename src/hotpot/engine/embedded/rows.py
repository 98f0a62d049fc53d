"""The state of the running requests as arrays, one row a slot, so that a decode step runs no Python per request.

Owns what each slot holds (its tokens, how many of them are in the cache, under which weights) and what its request has
sampled so far. Knows no model and no queue.

Invariants: ``tokens[slot, :length[slot]]`` is the context, ``cached[slot]`` of it is computed; during decoding exactly
the last token is not yet computed. What a slot holds may be reused only where ``epoch`` says that the weights serving
now computed all of it, and only as far as the tokens are equal.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotpot.engine.randomness import uniforms
from hotpot.types import GenerationRequest, SampleKey, VersionSpan

_CHUNK = 64


@dataclass(slots=True, eq=False)
class Flight:
    """A request in a slot, with what has to be said of it at the end. Times in seconds of one monotonic clock."""

    request: GenerationRequest
    slot: int
    reused: int
    submitted_s: float
    admitted_s: float
    spans: list[VersionSpan] = field(default_factory=list)


class RowTable:
    """Arrays over the slots.

    Parameters
    ----------
    num_slots, max_context_tokens: their sizes.
    vocab_size: width of ``seen``, which exists only where a repetition penalty is on (``track_seen``).
    """

    def __init__(self, num_slots: int, max_context_tokens: int, *, vocab_size: int, track_seen: bool) -> None:
        self.tokens = np.zeros((num_slots, max_context_tokens), dtype=np.int32)
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.cached = np.zeros(num_slots, dtype=np.int64)
        self.epoch = np.full(num_slots, -1, dtype=np.int64)
        self.purpose = np.zeros(num_slots, dtype=np.int64)
        self.count = np.zeros(num_slots, dtype=np.int64)
        self.limit = np.zeros(num_slots, dtype=np.int64)
        self.stops = np.full((num_slots, 1), -1, dtype=np.int64)
        self.uniforms = np.zeros((num_slots, _CHUNK))
        self.behaviour = np.zeros((num_slots, _CHUNK), dtype=np.float32)
        self.model = np.zeros((num_slots, _CHUNK), dtype=np.float32)
        self.seen = np.zeros((num_slots, vocab_size), dtype=np.bool_) if track_seen else None
        self._max_context = max_context_tokens
        self._keys: list[SampleKey | None] = [None] * num_slots

    def reusable(self, slot: int, prompt: NDArray[np.int32], epoch: int) -> int:
        """Return how many tokens of ``prompt`` the slot already holds under the weights of ``epoch``.

        At least the prompt's last token is always left to compute: its logits are needed.
        """
        if self.epoch[slot] != epoch:
            return 0
        most = min(int(self.cached[slot]), prompt.size - 1)
        different = np.flatnonzero(self.tokens[slot, :most] != prompt[:most])
        return int(different[0]) if different.size else most

    def enter(self, slot: int, request: GenerationRequest, reused: int, epoch: int) -> None:
        """Put a request's context into its slot. Its numbers are drawn by :meth:`draw`."""
        size = request.prompt.size
        self.tokens[slot, reused:size] = request.prompt[reused:]
        self.length[slot], self.cached[slot], self.epoch[slot] = size, reused, epoch
        self.count[slot] = 0
        self.limit[slot] = min(request.max_tokens, self._max_context - size)
        self._keys[slot] = request.key
        self._widen(int(self.limit[slot]), len(request.stop_tokens))
        self.stops[slot] = -1
        self.stops[slot, : len(request.stop_tokens)] = request.stop_tokens
        if self.seen is not None:
            self.seen[slot] = False
            self.seen[slot, request.prompt] = True

    def draw(self, slots: NDArray[np.int64], chunk: int) -> None:
        """Draw the numbers of chunk ``chunk`` (positions from ``64 * chunk``) for ``slots``."""
        positions = np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK)
        keys = [key for slot in slots if (key := self._keys[slot]) is not None]
        self.uniforms[slots] = uniforms(keys, positions)

    def next_uniforms(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number that samples each slot's next token: float64 ``[len(slots)]``."""
        count = self.count[slots]
        offset = count % _CHUNK
        fresh = offset == 0
        if fresh.any():
            for chunk in np.unique(count[fresh] // _CHUNK).tolist():
                self.draw(slots[count == chunk * _CHUNK], chunk)
        return self.uniforms[slots, offset]

    def append(
        self,
        slots: NDArray[np.int64],
        tokens: NDArray[np.int64],
        behaviour: NDArray[np.float32],
        model: NDArray[np.float32],
    ) -> NDArray[np.bool_]:
        """Record one sampled token a slot; return which of them end their generation."""
        count, length = self.count[slots], self.length[slots]
        self.tokens[slots, length] = tokens
        self.behaviour[slots, count] = behaviour
        self.model[slots, count] = model
        if self.seen is not None:
            self.seen[slots, tokens] = True
        count += 1
        self.cached[slots] = length
        self.length[slots] = length + 1
        self.count[slots] = count
        stopped = (self.stops[slots] == tokens[:, None]).any(axis=1)
        ended: NDArray[np.bool_] = stopped | (count >= self.limit[slots])
        return ended

    def _widen(self, limit: int, stops: int) -> None:
        while self.behaviour.shape[1] < limit:
            self.behaviour = np.concatenate([self.behaviour, np.zeros_like(self.behaviour)], axis=1)
            self.model = np.concatenate([self.model, np.zeros_like(self.model)], axis=1)
        if self.stops.shape[1] < stops:
            extra = np.full((len(self.stops), stops - self.stops.shape[1]), -1, dtype=np.int64)
            self.stops = np.concatenate([self.stops, extra], axis=1)
