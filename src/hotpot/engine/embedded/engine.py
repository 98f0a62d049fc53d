"""The engine that runs in this process: batched generation over the policies of ``models``.

Owns what happens in a step; weights and cache are with :mod:`.passes`::

    submit ──► gate ──► Scheduler: waiting ──► slot ──► SharedPrompts: the first of a prompt computes it
                                                 │ plan_stream: one token of every generating request,
                                                 ▼ and pieces of prompts, at most prefill_tokens
                            forward (one pass a step) ──► logits ──► sample ──► RowTable ──► Generation

Knows no messages, episodes or files. One thread at a time may call it.

Invariants: weights change only between steps, whole, and each sampled token is reported under the version that sampled
it. A prompt that is not complete at a publish is begun again. A request that has sampled goes on with the keys and
values that the old weights computed for its earlier tokens (computing them again would change what the sampled ones
were conditioned on); its slot is never reused by a later request. A new request reuses only what the weights serving
now computed, and only after comparing the tokens.
"""

import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded.exact import with_exact_logprobs
from hotpot.engine.embedded.passes import make_passes
from hotpot.engine.embedded.rows import Flight, RowTable
from hotpot.engine.embedded.sampler import sample
from hotpot.engine.embedded.scheduler import Scheduler
from hotpot.engine.embedded.shared_prompts import SharedPrompts
from hotpot.engine.embedded.stream import Stream, plan_stream
from hotpot.engine.gate import RequestGate
from hotpot.errors import EngineError
from hotpot.models import DecoderConfig, Policy, Weights
from hotpot.types import (
    EngineInfo,
    EngineReport,
    FinishReason,
    Generation,
    GenerationRequest,
    PublishReport,
    Purpose,
    SamplingParams,
    VersionSpan,
)

_NAME, _PRECISION, _DEVICE = "embedded", "float32", "cpu"


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
        exact: bool = False,
    ) -> None:
        config = model.config if isinstance(model, Policy) else model
        if max_context_tokens > config.max_context_tokens:
            raise EngineError(
                f"max_context_tokens is {max_context_tokens} but the model is built for {config.max_context_tokens}; "
                "lower rollout.max_context_tokens, or use a model with a longer context"
            )
        self.gate = RequestGate(sampling, vocab_size=config.vocab_size, max_context_tokens=max_context_tokens)
        self._params = list(dict.fromkeys(sampling.values()))
        self._settings = settings
        self._max_context = max_context_tokens
        self._exact = exact
        slots = settings.max_concurrency
        self._passes = make_passes(
            model,
            num_slots=slots,
            max_context_tokens=max_context_tokens,
            budget=settings.prefill_tokens,
            exact=exact,
        )
        self._checksum = self._passes.load(weights)
        self._passes.flip()
        self._version = policy_version
        self._epoch = 0
        self._rows = RowTable(
            slots,
            max_context_tokens,
            vocab_size=config.vocab_size,
            track_seen=any(p.repetition_penalty != 1 for p in sampling.values()),
        )
        self._scheduler = Scheduler(num_slots=slots, admit_share=settings.admit_share)
        self._waiting: dict[str, tuple[GenerationRequest, float]] = {}
        self._flights: dict[int, Flight] = {}
        # Slots whose prompt is not computed yet, in order of admission (a dictionary as an ordered set).
        self._prompts: dict[int, None] = {}
        self._shared = SharedPrompts()
        self._generating: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._ids: set[str] = set()
        self._closed = False

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; see :meth:`hotpot.engine.Engine.submit`."""
        self._check_open()
        self.gate.check(request)
        if request.request_id in self._ids:
            raise EngineError(
                f"request {request.request_id!r} is in flight already; give each request in flight its own id"
            )
        # Rows of a batch stand by slot, and sums round by row: a collection gives the same bits whatever was run before it.
        if self._scheduler.begin(request.session_id):
            self._shared = SharedPrompts()
        self._ids.add(request.request_id)
        self._waiting[request.request_id] = (request, time.perf_counter())
        self._scheduler.submit(request.request_id, request.session_id)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Do one forward pass: one token for every generating request, and the next pieces of prompts.

        Raises :class:`EngineError` where the weights give logits that are no distribution.
        """
        self._check_open()
        self._admit()
        if not self._flights:
            return []
        stream = plan_stream(self._rows, self._generating, list(self._prompts), self._settings.prefill_tokens)
        logits = self._forward(stream)
        self._rows.cached[stream.piece_slots] += stream.piece_lengths
        slots = stream.wanted_slots
        if not slots.size:
            return []
        return self._sample(slots, logits)

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
        for slot, flight in self._flights.items():
            self._close_span(slot, flight)
        self._passes.flip()
        self._version, self._checksum = policy_version, found
        self._epoch += 1
        nothing_sampled = self._rows.count[self._generating] == 0
        self._prompts |= dict.fromkeys(self._generating[nothing_sampled].tolist())
        self._generating = self._generating[~nothing_sampled]
        for slot in self._prompts:
            # Nothing is sampled yet: begin the prompt again, wholly under the new weights.
            self._rows.cached[slot], self._rows.epoch[slot] = 0, self._epoch
            self._flights[slot].reused = 0
        return PublishReport(
            policy_version=policy_version, checksum=found, seconds=time.perf_counter() - started
        )

    def info(self) -> EngineInfo:
        """Return what the engine serves right now, and its limits."""
        self._check_open()
        return EngineInfo(
            engine=_NAME,
            precision=_PRECISION,
            device=_DEVICE,
            num_threads=torch.get_num_threads(),
            policy_version=self._version,
            checksum=self._checksum,
            max_context_tokens=self._max_context,
            max_concurrency=self._settings.max_concurrency,
        )

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return not self._ids

    def close(self) -> None:
        """Give the weights and the cache back; requests in flight are never answered."""
        if self._closed:
            return
        self._closed = True
        del self._passes, self._rows

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")

    def _admit(self) -> None:
        now = time.perf_counter()
        for admission in self._scheduler.admit():
            request, submitted = self._waiting.pop(admission.request_id)
            slot = admission.slot
            kept = admission.returning and self._passes.remembers
            reused = self._rows.reusable(slot, request.prompt, self._epoch) if kept else 0
            self._rows.enter(slot, request, reused, self._epoch)
            self._rows.purpose[slot] = self._params.index(request.sampling)
            self._flights[slot] = Flight(
                request=request, slot=slot, reused=reused, submitted_s=submitted, admitted_s=now
            )
            if reused or not self._passes.remembers:
                self._prompts[slot] = None
            else:
                self._share(slot, request.prompt)

    def _share(self, slot: int, prompt: NDArray[np.int32]) -> None:
        """Let ``slot`` take ``prompt`` from a slot that holds it, wait for one that computes it, or compute it."""
        rows, holder = self._rows, self._shared.holder(prompt)
        if holder == slot:
            holder = None
        if holder is not None and rows.reusable(holder, prompt, self._epoch) == prompt.size - 1:
            self._adopt(holder, [slot])
        elif holder in self._prompts and np.array_equal(rows.tokens[holder, : rows.length[holder]], prompt):
            self._shared.follow(slot, holder)
        else:
            self._shared.lead(slot, prompt)
            self._prompts[slot] = None

    def _adopt(self, leader: int, slots: list[int]) -> None:
        """Let ``slots``, which have the same prompt as ``leader``, generate from its keys and values."""
        reused = int(self._rows.length[slots[0]]) - 1
        self._passes.copy(leader, torch.tensor(slots), reused)
        self._rows.cached[slots], self._rows.epoch[slots] = reused, self._epoch
        for slot in slots:
            self._flights[slot].reused = reused
        self._generating = np.union1d(self._generating, np.array(slots, dtype=np.int64))

    def _forward(self, stream: Stream) -> NDArray[np.float32]:
        """Compute one pass; return logits float32 ``[M, vocab_size]`` of the stream's wanted tokens."""
        result: NDArray[np.float32] = self._passes.logits(self._rows, stream).numpy()
        return result

    def _sample(self, slots: NDArray[np.int64], logits: NDArray[np.float32]) -> list[Generation]:
        rows = self._rows
        seen = None if rows.seen is None else rows.seen[slots]
        groups = self._groups(slots)
        drawn = sample(logits, groups, rows.next_uniforms(slots), seen)
        if self._exact:
            drawn = with_exact_logprobs(drawn, torch.from_numpy(logits), groups)
        sound = np.isfinite(drawn.model_logprobs)
        if not sound.all():
            # The others sample from the same logits in the next step: leave their last token to compute again.
            rows.cached[slots] = rows.length[slots] - 1
            self._drop(slots[~sound])
        ended = rows.append(slots, drawn.tokens, drawn.behaviour_logprobs, drawn.model_logprobs)
        if not ended.any() and len(slots) == len(self._generating):
            return []
        # Every slot that generated or has completed its prompt is among ``slots``.
        self._generating = slots[~ended]
        for slot in [slot for slot in slots[rows.count[slots] == 1].tolist() if slot in self._prompts]:
            del self._prompts[slot]
            if followers := self._shared.release(slot):
                self._adopt(slot, followers)
        return [self._finish(slot) for slot in slots[ended].tolist()]

    def _groups(self, slots: NDArray[np.int64]) -> list[tuple[SamplingParams, NDArray[np.intp]]]:
        """Return the rows of ``slots`` by their purpose's sampling parameters."""
        if len(self._params) == 1:
            return [(self._params[0], np.arange(len(slots)))]
        which = self._rows.purpose[slots]
        return [(self._params[index], np.flatnonzero(which == index)) for index in np.unique(which).tolist()]

    def _drop(self, slots: NDArray[np.int64]) -> None:
        """Forget the requests in ``slots``, whose logits are no distribution, and raise an error that names them."""
        names = []
        for slot in slots.tolist():
            request = self._flights.pop(slot).request
            names.append(request.request_id)
            self._ids.discard(request.request_id)
            self._scheduler.finish(request.request_id)
            self._rows.epoch[slot] = -1
            self._prompts.pop(slot, None)
            self._prompts |= dict.fromkeys(self._shared.release(slot))
        self._passes.clear(torch.from_numpy(slots))
        self._generating = np.setdiff1d(self._generating, slots, assume_unique=True)
        raise EngineError(
            f"policy version {self._version} gives logits that are no distribution (NaN or infinity) for "
            f"{len(names)} requests, {names[:3]} among them; they are dropped: publish sound weights and submit them again"
        )

    def _close_span(self, slot: int, flight: Flight) -> None:
        length = int(self._rows.count[slot]) - sum(span.length for span in flight.spans)
        if length:
            flight.spans.append(
                VersionSpan(policy_version=self._version, checksum=self._checksum, length=length)
            )

    def _finish(self, slot: int) -> Generation:
        flight, rows = self._flights.pop(slot), self._rows
        request, count, length = flight.request, int(rows.count[slot]), int(rows.length[slot])
        self._close_span(slot, flight)
        self._scheduler.finish(request.request_id)
        self._ids.discard(request.request_id)
        tokens = rows.tokens[slot, length - count : length].copy()
        if int(tokens[-1]) in request.stop_tokens:
            finish = FinishReason.STOP
        elif count == request.max_tokens:
            finish = FinishReason.MAX_TOKENS
        else:
            finish = FinishReason.MAX_CONTEXT
        now = time.perf_counter()
        return Generation(
            request_id=request.request_id,
            tokens=tokens,
            behaviour_logprobs=rows.behaviour[slot, :count].copy(),
            model_logprobs=rows.model[slot, :count].copy(),
            finish=finish,
            versions=tuple(flight.spans),
            report=EngineReport(
                engine=_NAME,
                precision=_PRECISION,
                device=_DEVICE,
                num_threads=torch.get_num_threads(),
                sampling=request.sampling,
                reused_tokens=flight.reused,
                queue_s=flight.admitted_s - flight.submitted_s,
                generate_s=now - flight.admitted_s,
            ),
        )
