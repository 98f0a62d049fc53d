"""The running requests as arrays, one row each, so that a decode step runs no Python per request.

Owns what each row's context is, how much of it is computed, and what its request has sampled so far. Knows no model, no
memory and no queue.

Invariants: ``tokens[row, :length[row]]`` is the context, ``cached[row]`` of it is computed; during decoding exactly the last
token is not yet computed. A request that was preempted goes on where it was: its sampled tokens, their log-probabilities and
the numbers that will sample the next ones are the same.
"""

import numpy as np
from numpy.typing import NDArray

from hotpot.engine.embedded.flights import Flight, Progress
from hotpot.engine.randomness import uniforms
from hotpot.types import SampleKey

_CHUNK = 64


class RowTable:
    """Arrays over the rows.

    Parameters
    ----------
    num_rows, max_context_tokens: their sizes.
    vocab_size: width of ``seen``, which exists only where a repetition penalty is on (``track_seen``).
    """

    def __init__(self, num_rows: int, max_context_tokens: int, *, vocab_size: int, track_seen: bool) -> None:
        self.tokens = np.zeros((num_rows, max_context_tokens), dtype=np.int32)
        self.length = np.zeros(num_rows, dtype=np.int64)
        self.cached = np.zeros(num_rows, dtype=np.int64)
        self.purpose = np.zeros(num_rows, dtype=np.int64)
        self.count = np.zeros(num_rows, dtype=np.int64)
        self.limit = np.zeros(num_rows, dtype=np.int64)
        self.stops = np.full((num_rows, 1), -1, dtype=np.int64)
        self.uniforms = np.zeros((num_rows, _CHUNK))
        self.behaviour = np.zeros((num_rows, _CHUNK), dtype=np.float32)
        self.model = np.zeros((num_rows, _CHUNK), dtype=np.float32)
        self.seen = np.zeros((num_rows, vocab_size), dtype=np.bool_) if track_seen else None
        self._max_context = max_context_tokens
        self._keys: list[SampleKey | None] = [None] * num_rows

    def enter(self, row: int, flight: Flight, reused: int) -> None:
        """Put a request into its row: its prompt, what it has sampled before, and how much of both is computed."""
        request, sampled = flight.request, flight.sampled
        count, size = len(sampled.tokens), request.prompt.size
        self.tokens[row, :size] = request.prompt
        self.tokens[row, size : size + count] = sampled.tokens
        self.length[row], self.cached[row], self.count[row] = size + count, reused, count
        self.limit[row] = min(request.max_tokens, self._max_context - size)
        self._keys[row] = request.key
        self._widen(int(self.limit[row]), len(request.stop_tokens))
        self.behaviour[row, :count], self.model[row, :count] = sampled.behaviour, sampled.model
        if count % _CHUNK:
            self.draw(np.array([row]), count // _CHUNK)
        self.stops[row] = -1
        self.stops[row, : len(request.stop_tokens)] = request.stop_tokens
        if self.seen is not None:
            self.seen[row] = False
            self.seen[row, self.tokens[row, : size + count]] = True

    def context(self, row: int) -> NDArray[np.int32]:
        """Return prompt and sampled tokens of ``row``: int32 ``[n]``, not copied."""
        return self.tokens[row, : self.length[row]]

    def sampled(self, row: int) -> Progress:
        """Return what the request in ``row`` has sampled, copied."""
        count, length = int(self.count[row]), int(self.length[row])
        return Progress(
            self.tokens[row, length - count : length].copy(),
            self.behaviour[row, :count].copy(),
            self.model[row, :count].copy(),
        )

    def draw(self, rows: NDArray[np.int64], chunk: int) -> None:
        """Draw the numbers of chunk ``chunk`` (positions from ``64 * chunk``) for ``rows``."""
        positions = np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK)
        keys = [key for row in rows if (key := self._keys[row]) is not None]
        self.uniforms[rows] = uniforms(keys, positions)

    def next_uniforms(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number that samples each row's next token: float64 ``[len(rows)]``."""
        count = self.count[rows]
        offset = count % _CHUNK
        fresh = offset == 0
        if fresh.any():
            for chunk in np.unique(count[fresh] // _CHUNK).tolist():
                self.draw(rows[count == chunk * _CHUNK], chunk)
        return self.uniforms[rows, offset]

    def append(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        behaviour: NDArray[np.float32],
        model: NDArray[np.float32],
    ) -> NDArray[np.bool_]:
        """Record one sampled token a row; return which of them end their generation."""
        count, length = self.count[rows], self.length[rows]
        self.tokens[rows, length] = tokens
        self.behaviour[rows, count] = behaviour
        self.model[rows, count] = model
        if self.seen is not None:
            self.seen[rows, tokens] = True
        count += 1
        self.cached[rows] = length
        self.length[rows] = length + 1
        self.count[rows] = count
        stopped = (self.stops[rows] == tokens[:, None]).any(axis=1)
        ended: NDArray[np.bool_] = stopped | (count >= self.limit[rows])
        return ended

    def _widen(self, limit: int, stops: int) -> None:
        while self.behaviour.shape[1] < limit:
            self.behaviour = np.concatenate([self.behaviour, np.zeros_like(self.behaviour)], axis=1)
            self.model = np.concatenate([self.model, np.zeros_like(self.model)], axis=1)
        if self.stops.shape[1] < stops:
            extra = np.full((len(self.stops), stops - self.stops.shape[1]), -1, dtype=np.int64)
            self.stops = np.concatenate([self.stops, extra], axis=1)
