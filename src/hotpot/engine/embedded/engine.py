"""The engine that runs in this process: batched generation over the policies of ``models``.

Owns what happens in a step; weights and keys and values are with :mod:`.passes`::

    submit ──► gate ──► Scheduler: waiting ──► row ──► ContextMemory: blocks, what is known already, or wait for who computes it
                            ▲                    │ plan_stream: one token of every generating request,
                            │ preempt            ▼ and pieces of prompts, at most prefill_tokens
                            └── forward (one pass a step) ──► logits ──► sample ──► RowTable ──► Generation

Knows no messages, episodes or files. One thread at a time may call it.

Invariants: weights change only between steps, whole, and each sampled token is reported under the version that sampled
it. A context that is not complete at a publish is begun again. A request that generates goes on with the keys and values that
the old weights computed for its earlier tokens (computing them again would change what the sampled ones were conditioned
on), unless it had to wait in between; nobody else reads these. A request reuses only what the weights serving now computed, and only after comparing the tokens.
Keys and values never take more than ``kv_cache_bytes``: where a block is missing the request that was started last gives its
blocks back, waits, and goes on where it was.
"""

import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded.blocks import BLOCK_TOKENS
from hotpot.engine.embedded.budget import MemoryUsage, make_memory, usage_of
from hotpot.engine.embedded.exact import with_exact_logprobs
from hotpot.engine.embedded.flights import DEVICE, NAME, PRECISION, Flight
from hotpot.engine.embedded.memory import Placement
from hotpot.engine.embedded.passes import make_passes
from hotpot.engine.embedded.rows import RowTable
from hotpot.engine.embedded.sampler import sample
from hotpot.engine.embedded.scheduler import Scheduler
from hotpot.engine.embedded.stream import Stream, plan_stream
from hotpot.engine.gate import RequestGate
from hotpot.errors import EngineError
from hotpot.models import DecoderConfig, Policy, Weights
from hotpot.timeline import Timeline
from hotpot.types import (
    EngineInfo,
    Generation,
    GenerationRequest,
    PublishReport,
    Purpose,
    SamplingParams,
)


class EmbeddedEngine:
    """Implements :class:`hotpot.engine.Engine` on the CPU.

    Parameters
    ----------
    model: shape of a :class:`hotpot.models.Decoder`, or a policy of another kind, which is copied.
    weights: what it serves first; copied.
    settings: the recipe's ``[engine]`` section.
    max_context_tokens: prompt and sampled tokens of one request together; at most what the model is built for.
    sampling: frozen parameters of each purpose the engine serves.
    policy_version: version of ``weights``.
    exact: compute so that a request's bits hang on nothing but its own tokens and the weights, and are a learner's
        (:mod:`hotpot.models.exact`); one thread.
    forgetful: a session that is new to an idle engine finds nothing of what ran before, so that the same sequence of calls gives the
        same bits whatever came earlier; ``exact`` needs no such thing.
    """

    def __init__(
        self,
        model: DecoderConfig | Policy,
        weights: Weights,
        *,
        settings: EngineSection,
        max_context_tokens: int,
        sampling: Mapping[Purpose, SamplingParams],
        policy_version: int = 0,
        forgetful: bool = False,
        exact: bool = False,
    ) -> None:
        config = model.config if isinstance(model, Policy) else model
        if max_context_tokens > config.max_context_tokens:
            raise EngineError(
                f"max_context_tokens is {max_context_tokens} but the model is built for {config.max_context_tokens}; "
                "lower rollout.max_context_tokens, or use a model with a longer context"
            )
        self.gate = RequestGate(sampling, vocab_size=config.vocab_size, max_context_tokens=max_context_tokens)
        self.clock = Timeline()
        self._params = list(dict.fromkeys(sampling.values()))
        self._settings = settings
        self._max_context = max_context_tokens
        self._exact = exact
        self._passes = make_passes(
            model, max_context_tokens=max_context_tokens, budget=settings.prefill_tokens, exact=exact
        )
        self._checksum = self._passes.load(weights)
        self._passes.flip()
        self._version = policy_version
        rows = settings.max_concurrency
        self._rows = RowTable(
            rows,
            max_context_tokens,
            vocab_size=config.vocab_size,
            track_seen=any(p.repetition_penalty != 1 for p in sampling.values()),
        )
        self._memory = make_memory(self._passes, settings, max_context_tokens, root=self._root)
        self._scheduler = Scheduler(num_rows=rows, admit_share=settings.admit_share)
        self._flights: dict[str, Flight] = {}
        self._by_row: dict[int, Flight] = {}
        # Rows whose context is not computed yet, in order of admission (a dictionary as an ordered set).
        self._prompts: dict[int, None] = {}
        self._generates = np.zeros(rows, dtype=np.bool_)
        self._no_room = False
        self._sessions: set[str] | None = set() if forgetful else None
        self._closed = False

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; see :meth:`hotpot.engine.Engine.submit`."""
        self._check_open()
        self.gate.check(request)
        if request.request_id in self._flights:
            raise EngineError(
                f"request {request.request_id!r} is in flight already; give each request in flight its own id"
            )
        if self._sessions is not None:
            self._begin(request.session_id, self._sessions)
        self._flights[request.request_id] = Flight(request=request, submitted_s=time.perf_counter())
        self._scheduler.submit(request.request_id)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Do one forward pass: one token for every generating request, and the next pieces of prompts.

        Raises :class:`EngineError` where the weights give logits that are no distribution.
        """
        self._check_open()
        self._admit()
        self._make_room()
        if not self._by_row:
            return []
        rows = self._rows
        stream = plan_stream(rows, self._generating, list(self._prompts), self._settings.prefill_tokens)
        with self.clock.span("forward"):
            logits = self._forward(stream)
        # Can be found by others once the context is complete, and what it computes is known to be sound.
        rows.cached[stream.piece_rows] += stream.piece_lengths
        return self._sample(stream.wanted_rows, logits) if stream.wanted.size else []

    def publish(self, weights: Weights, policy_version: int) -> PublishReport:
        """Serve a copy of ``weights`` from the next step on; see :meth:`hotpot.engine.Engine.publish`.

        The copy goes into the buffer that is not serving and is compared with its source by checksum before the two
        change places, so weights that an optimiser changes meanwhile are refused.
        """
        self._check_open()
        started = time.perf_counter()
        if policy_version <= self._version:
            raise EngineError(
                f"policy version {policy_version} does not grow: {self._version} is being served; "
                "versions are never reused, take the next one"
            )
        found = self._passes.load(weights)
        for flight in self._by_row.values():
            self._close_span(flight)
        self._passes.flip()
        self._version, self._checksum = policy_version, found
        self._memory.restart(self._root)
        self._no_room = False
        nothing_sampled = np.flatnonzero(self._generates & (self._rows.count == 0)).tolist()
        # The last first, so that they wait in the order they came, each before those that waited for it.
        for row in sorted({*self._prompts, *nothing_sampled}, key=self._order, reverse=True):
            self._put_back(row)
        return PublishReport(
            policy_version=policy_version, checksum=found, seconds=time.perf_counter() - started
        )

    def info(self) -> EngineInfo:
        """Return what the engine serves right now, and its limits."""
        self._check_open()
        return EngineInfo(
            engine=NAME,
            precision=PRECISION,
            device=DEVICE,
            num_threads=torch.get_num_threads(),
            policy_version=self._version,
            checksum=self._checksum,
            max_context_tokens=self._max_context,
            max_concurrency=self._settings.max_concurrency,
        )

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return not self._flights

    @property
    def usage(self) -> MemoryUsage:
        """How the memory for keys and values is used right now."""
        self._check_open()
        return usage_of(self._memory.pool, self._passes.store, self._settings.kv_cache_bytes)

    def close(self) -> None:
        """Give the weights and the cache back; requests in flight are never answered."""
        if self._closed:
            return
        self._closed = True
        del self._passes, self._rows, self._memory

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")

    @property
    def _generating(self) -> NDArray[np.int64]:
        """Rows that have one token to compute, ascending."""
        return np.flatnonzero(self._generates)

    @property
    def _root(self) -> str:
        """All that keys and values depend on besides the tokens."""
        return f"{self._version} {self._checksum} {PRECISION} {DEVICE}"

    def _begin(self, session_id: str, known: set[str]) -> None:
        """Let a session that is new to an idle engine find nothing."""
        if not self._flights and session_id not in known:
            self._memory.restart(self._root)
            known.clear()
        known.add(session_id)

    def _admit(self) -> None:
        """Start as many of the waiting requests as there are rows and blocks for."""
        if self._no_room or not self._scheduler.ready():
            return
        now = time.perf_counter()
        copies: list[tuple[int, int]] = []
        try:
            while (head := self._scheduler.head) is not None:
                flight, row = self._flights[head], self._scheduler.next_row()
                placed = self._memory.place(row, flight.context, headroom=self._scheduler.num_running)
                if isinstance(placed, Placement):
                    copies += placed.copies
                    self._start(flight, placed.reused, now)
                elif placed.leader is not None:
                    self._scheduler.follow(self._by_row[placed.leader].request.request_id)
                else:
                    self._no_room = True
                    break
        finally:
            # Rows that were placed count on them.
            self._passes.store.copy(copies)

    def _start(self, flight: Flight, reused: int, now: float) -> None:
        _, row = self._scheduler.start()
        if flight.admitted_s is None or not len(flight.sampled.tokens):
            flight.reused = reused
        flight.row, flight.admitted_s = row, flight.admitted_s or now
        self._by_row[row] = flight
        self._rows.enter(row, flight, reused)
        self._rows.purpose[row] = self._params.index(flight.request.sampling)
        if self._passes.remembers and self._rows.length[row] - reused == 1:
            self._generates[row] = True
        else:
            self._prompts[row] = None

    def _make_room(self) -> None:
        """Give every generating request a block for its next token; preempt the newest where there is none."""
        rows, memory = self._rows, self._memory
        which = self._generating
        for row in which[rows.cached[which] >= memory.count[which] * BLOCK_TOKENS].tolist():
            while row in self._by_row and not memory.grow(row):
                newest = self._flights[self._scheduler.newest()]
                newest.preemptions += 1
                self._put_back(newest.row)

    def _put_back(self, row: int) -> None:
        """Let the request in ``row`` wait again, with what it has sampled."""
        flight = self._by_row[row]
        flight.sampled = self._rows.sampled(row)
        # Weights may be published before it goes on.
        self._close_span(flight)
        if row not in self._prompts:
            self._memory.seal(row, self._rows.context(row), int(self._rows.cached[row]))
        self._leave(row)
        self._scheduler.preempt(flight.request.request_id)

    def _leave(self, row: int) -> None:
        """Take the request in ``row`` out of it, and give its blocks back."""
        freed = self._memory.release(row)
        if row in self._prompts:
            # Whether what was computed here is finite nobody has seen yet.
            self._passes.store.clear(freed)
        flight = self._by_row.pop(row)
        flight.row = -1
        self._prompts.pop(row, None)
        self._generates[row] = False
        self._no_room = False

    def _order(self, row: int) -> int:
        """Return how many requests were started before that in ``row``."""
        return list(self._by_row).index(row)

    def _forward(self, stream: Stream) -> NDArray[np.float32]:
        """Compute one pass; return logits float32 ``[M, vocab_size]`` of the stream's wanted tokens."""
        result: NDArray[np.float32] = self._passes.logits(self._rows, self._memory.table, stream).numpy()
        return result

    def _sample(self, which: NDArray[np.int64], logits: NDArray[np.float32]) -> list[Generation]:
        rows = self._rows
        seen = None if rows.seen is None else rows.seen[which]
        groups = self._groups(which)
        with self.clock.span("sample"):
            drawn = sample(logits, groups, rows.next_uniforms(which), seen)
            if self._exact:
                drawn = with_exact_logprobs(drawn, torch.from_numpy(logits), groups)
        sound = np.isfinite(drawn.model_logprobs)
        if not sound.all():
            # The others sample from the same logits in the next step: leave their last token to compute again.
            rows.cached[which] = rows.length[which] - 1
            self._drop(which[~sound])
        ended = rows.append(which, drawn.tokens, drawn.behaviour_logprobs, drawn.model_logprobs)
        for row in which[rows.cached[which] % BLOCK_TOKENS == 0].tolist():
            self._memory.computed(row, rows.context(row), int(rows.cached[row]))
        for row in [row for row in which.tolist() if row in self._prompts] if self._prompts else []:
            del self._prompts[row]
            self._generates[row] = True
            self._memory.seal(row, rows.context(row), int(rows.cached[row]))
            self._scheduler.release(self._by_row[row].request.request_id)
            self._no_room = False
        return [self._finish(row) for row in which[ended].tolist()]

    def _groups(self, which: NDArray[np.int64]) -> list[tuple[SamplingParams, NDArray[np.intp]]]:
        """Return the places in ``which`` by their purpose's sampling parameters."""
        if len(self._params) == 1:
            return [(self._params[0], np.arange(len(which)))]
        purpose = self._rows.purpose[which]
        return [
            (self._params[index], np.flatnonzero(purpose == index)) for index in np.unique(purpose).tolist()
        ]

    def _drop(self, which: NDArray[np.int64]) -> None:
        """Forget the requests in rows ``which``, whose logits are no distribution, and raise an error that names them."""
        names = []
        for row in which.tolist():
            names.append(self._by_row[row].request.request_id)
            self._passes.store.clear(self._memory.discard(row))
            self._leave(row)
            self._scheduler.finish(names[-1])
            del self._flights[names[-1]]
        raise EngineError(
            f"policy version {self._version} gives logits that are no distribution (NaN or infinity) for "
            f"{len(names)} requests, {names[:3]} among them; they are dropped: publish sound weights and submit them again"
        )

    def _close_span(self, flight: Flight) -> None:
        flight.close_span(int(self._rows.count[flight.row]), self._version, self._checksum)

    def _finish(self, row: int) -> Generation:
        flight, done = self._by_row[row], self._rows.sampled(row)
        self._close_span(flight)
        self._memory.seal(row, self._rows.context(row), int(self._rows.cached[row]))
        self._leave(row)
        name = flight.request.request_id
        self._scheduler.finish(name)
        del self._flights[name]
        return flight.answer(done, now_s=time.perf_counter(), num_threads=torch.get_num_threads())
