"""One episode as a state machine: a request for the engine, its answer into the environment, until an end.

::

    opening ──► (actor) ──► resume ──► next_request ──► (engine) ──► receive ──► (actor) ──► resume ──► … ──► trajectory
                              ▲                                        │
                              └──── a note for the next window ◄───────┘

Owns the order of things inside an episode, its limits and the check that each prompt extends what is recorded. Knows
no engine, no environment (it says which call is to be made, and takes the reply), no other episode, no ledger; it waits for
nothing and decides nothing by the clock but its time limit, to which it is charged its own time only: that of its
environment, and of the engine while its request was out.

Limits
------
``answered`` the environment is done; ``max_steps`` as many model calls as allowed; ``max_step_tokens`` an output was
cut at that length; ``max_context`` the context is full (or cut an output) and ``rollout.context_overflow`` knows no way
on; ``max_seconds`` its time was over after a step. A limit ends the episode without asking the environment again: the rewards so far count, success is false.
Whatever goes wrong in the environment raises :class:`EnvironmentFailure` instead: then there is no trajectory.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hotpot.config import RolloutSection
from hotpot.errors import EngineError, EnvironmentFailure
from hotpot.rollout.actors.calls import Call, CallKind, Reply
from hotpot.rollout.clock import Clock
from hotpot.rollout.context import Context
from hotpot.rollout.dialect import Dialect
from hotpot.rollout.engine_report import ReportCheck
from hotpot.rollout.prompt import Output
from hotpot.rollout.recorder import Provenance, Recorder, StepTimes, own
from hotpot.rollout.seeds import environment_seed, sampling_seed
from hotpot.rollout.tasks import EpisodePlan
from hotpot.rollout.windows import NextPrompt, Windows
from hotpot.types import (
    Action,
    ContextChange,
    EndReason,
    FinishReason,
    Generation,
    GenerationRequest,
    Message,
    Observation,
    Purpose,
    Role,
    SampleKey,
    SamplingParams,
    StepResult,
    ToolSpec,
    Trajectory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """What all episodes of a rollout for one purpose have in common.

    ``max_context_tokens`` is the smaller of the recipe's and the engine's. ``redact`` maps text of an environment to
    text without secrets and the number of those it removed. ``reports`` compares what the engine says it did with what was
    asked.
    """

    purpose: Purpose
    sampling: SamplingParams
    limits: RolloutSection
    max_context_tokens: int
    deterministic: bool
    system_prompt: str
    redact: Callable[[str], tuple[str, int]]
    reports: ReportCheck = field(default_factory=ReportCheck)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A step whose action is with the environment."""

    request: GenerationRequest
    sent: NextPrompt
    output: Output
    generation: Generation
    generated_us: int


class Episode:
    """One attempt at one episode.

    :meth:`opening` is the first call to make; its reply goes to :meth:`resume`. Then :meth:`next_request` is what to ask the
    engine; the answer goes to :meth:`receive`, and where that gives a call, the reply to :meth:`resume`; until
    :attr:`finished`, then :meth:`trajectory`. Whoever opened it asks for its environment's CLOSE in any case.
    """

    def __init__(
        self,
        plan: EpisodePlan,
        *,
        attempt: int,
        dialect: Dialect,
        rules: EpisodeRules,
        provenance: Provenance,
        clock: Clock,
    ) -> None:
        self.plan = plan
        self.attempt = attempt
        self.num_redactions = 0
        self._dialect = dialect
        self._rules = rules
        self._provenance = provenance
        self._clock = clock
        self._recorder = Recorder(plan, attempt, rules.purpose, provenance)
        self._context = Context(self.attempt_id)
        self._taken: _Taken | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._windows: Windows | None = None
        self._next: NextPrompt | None = None
        self._request: GenerationRequest | None = None
        self._turn = self._next_turn = 0
        self._num_notes = 0
        self._end: EndReason | None = None
        self._success = False
        self._spent_s = 0.0
        self._started_us = self._prompt_us = self._finished_us = 0

    @property
    def attempt_id(self) -> str:
        """Id of the attempt, and of its trajectory."""
        return self._recorder.attempt_id

    @property
    def finished(self) -> bool:
        """Whether the episode has come to an end."""
        return self._end is not None

    def call(self, kind: CallKind, action: Action | None = None) -> Call:
        """Return a call of this episode's environment."""
        opening = kind is CallKind.OPEN
        return Call(
            kind=kind,
            attempt_id=self.attempt_id,
            environment=self.plan.environment,
            actor_id=self._provenance.actor_id,
            task=self.plan.task if opening else None,
            seed=environment_seed(self._provenance.seed, self.plan) if opening else 0,
            action=action,
        )

    def opening(self) -> Call:
        """Return the call that makes and resets the environment."""
        self._started_us = self._clock.now_us()
        return self.call(CallKind.OPEN)

    def resume(self, reply: Reply) -> None:
        """Take what the environment replied to the call that was made last.

        Raises :class:`EnvironmentFailure` where that is a failure, or the opening leaves no room.
        """
        if reply.failure is not None:
            raise reply.failure
        self._spent_s += reply.seconds
        if reply.observation is not None:
            self._open(reply.observation)
        elif reply.result is not None and self._taken is not None:
            taken, self._taken = self._taken, None
            self._complete(taken, reply.result, reply.seconds)

    def _open(self, observation: Observation) -> None:
        rules = self._rules
        system = (Message(role=Role.SYSTEM, content=rules.system_prompt),) if rules.system_prompt else ()
        messages = (*system, *self._redacted(observation.messages))
        self._tools = observation.tools
        conversation, prompt = self._dialect.open(messages, observation.tools)
        self._windows = Windows(conversation, rules.limits, rules.max_context_tokens)
        opening = self._windows.opening(prompt)
        if opening is None:
            raise EnvironmentFailure(
                f"the opening prompt has {len(prompt.tokens)} tokens, which leaves no room in a context of "
                f"{rules.max_context_tokens}; raise rollout.max_context_tokens, or shorten the task"
            )
        self._continue_with(opening)

    def next_request(self) -> GenerationRequest | None:
        """Return the request for the next step, or None where one is out or the episode has ended."""
        if self._next is None or self._request is not None or self.finished:
            return None
        rules, step = self._rules, len(self._recorder.steps)
        context = self._context.tokens
        self._request = GenerationRequest(
            request_id=f"{self.attempt_id}:{step}",
            session_id=self.attempt_id,
            prompt=context,
            stop_tokens=self._dialect.stop_tokens,
            max_tokens=min(self._next.max_tokens, rules.max_context_tokens - len(context)),
            purpose=rules.purpose,
            sampling=rules.sampling,
            key=SampleKey(
                seed=sampling_seed(self._provenance.seed, rules.purpose),
                issue=self.plan.issue,
                sample=self.plan.sample,
                step=step,
            ),
            sender=f"environment {self._provenance.env_version}, actor {self._provenance.actor_id}",
        )
        return self._request

    def receive(self, generation: Generation, *, waited_s: float = 0.0) -> Call | None:
        """Take the engine's answer; return the call that carries its action out, or None where there is none to carry out
        (the output was cut, or is a note): then the step is recorded, and the episode goes on or has ended.

        ``waited_s`` seconds the engine worked while the request was out. Raises :class:`EngineError` where the
        generation is not an answer to that request, or the request's prompt is no longer what is on record, and
        :class:`EngineReportError` where the engine reports that it sampled otherwise and the recipe refuses that.
        """
        request, sent, windows = self._request, self._next, self._windows
        if request is None or sent is None or windows is None or self._taken is not None:
            raise EngineError(
                f"generation {generation.request_id!r} came for {self.attempt_id}, which waits for none"
            )
        generated_us = self._clock.now_us()
        tokens = own(generation.tokens, np.int32)
        noted = windows.asked
        output = self._dialect.parse_note(tokens) if noted else self._dialect.parse(tokens, self._tools)
        _check_generation(generation, request, output)
        self._rules.reports.check(generation, request)
        self._context.prove(request.prompt)
        self._spent_s += waited_s
        taken = _Taken(
            request=request, sent=sent, output=output, generation=generation, generated_us=generated_us
        )
        if output.ended and not noted:
            self._taken = taken
            return self.call(CallKind.STEP, output.action)
        self._complete(taken, None, 0.0)
        return None

    def _complete(self, taken: _Taken, result: StepResult | None, environment_s: float) -> None:
        """Record a step, with what the environment made of it, and go on or end."""
        windows, sent, output = self._windows, taken.sent, taken.output
        if windows is None:
            raise EngineError(f"episode {self.attempt_id} has a step before its opening")
        noted = windows.asked
        self._finished_us = self._clock.now_us()
        self._request = None
        times = StepTimes(
            started_us=self._prompt_us,
            generated_us=taken.generated_us,
            finished_us=self._finished_us,
            environment_s=environment_s,
        )
        place = self._context.place(self._turn, sent.change, sent.dropped_tokens)
        self._recorder.record(place, sent.prompt, output, taken.generation, result, times)
        self._context.add_sampled(output.tokens)
        if noted:
            self._go_on_with_note(windows, output)
            return
        self._end = self._ends(taken.generation, taken.request, result)
        if self._end is None and result is not None:
            self._go_on(windows, output, result)
        elif result is not None:
            self._success = bool(result.success)

    def refused_for_room(self, reason: str) -> None:
        """End the episode: the engine has less room than it said, and refused the request that is out for ``reason``.

        Raises :class:`EnvironmentFailure` where not one step was taken, so that there is no trajectory.
        """
        self._request = None
        if not self._recorder.steps:
            raise EnvironmentFailure(f"the opening prompt is too long for the engine: {reason}")
        self._end = EndReason.MAX_CONTEXT

    def trajectory(self) -> Trajectory:
        """Return what happened, once the episode has ended."""
        if self._end is None:
            raise EnvironmentFailure(f"episode {self.attempt_id} has not ended; there is no trajectory yet")
        return self._recorder.trajectory(
            self._end, success=self._success, started_us=self._started_us, finished_us=self._finished_us
        )

    def _ends(
        self, generation: Generation, request: GenerationRequest, result: StepResult | None
    ) -> EndReason | None:
        limits = self._rules.limits
        if result is None:
            cut_by_step = (
                generation.finish is FinishReason.MAX_TOKENS and request.max_tokens == limits.max_step_tokens
            )
            return EndReason.MAX_STEP_TOKENS if cut_by_step else EndReason.MAX_CONTEXT
        if result.done:
            return EndReason.ANSWERED
        if len(self._recorder.steps) - self._num_notes >= limits.max_steps:
            return EndReason.MAX_STEPS
        return EndReason.MAX_SECONDS if self._time_is_over() else None

    def _time_is_over(self) -> bool:
        return self._spent_s >= self._rules.limits.max_seconds and not self._rules.deterministic

    def _go_on(self, windows: Windows, output: Output, result: StepResult) -> None:
        following = windows.go_on(output, self._redacted(result.messages), len(self._context))
        if following is None:
            self._end = EndReason.MAX_CONTEXT
            return
        self._next_turn = self._turn + any(message.role is Role.USER for message in result.messages)
        self._continue_with(following)

    def _go_on_with_note(self, windows: Windows, output: Output) -> None:
        self._num_notes += 1
        if self._time_is_over():
            self._end = EndReason.MAX_SECONDS
            return
        self._continue_with(windows.take_note(output))

    def _continue_with(self, following: NextPrompt) -> None:
        self._context.add_prompt(following.prompt)
        self._next = following
        if following.change is not ContextChange.HANDOVER:
            self._turn = self._next_turn
        self._prompt_us = self._clock.now_us()

    def _redacted(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        texts = []
        for message in messages:
            text, count = self._rules.redact(message.content)
            if count:
                self.num_redactions += count
                message = dataclasses.replace(message, content=text)
            texts.append(message)
        return tuple(texts)


def _check_generation(generation: Generation, request: GenerationRequest, output: Output) -> None:
    count = len(generation.tokens)
    if generation.request_id != request.request_id:
        fault = f"answers {generation.request_id!r}"
    elif not 0 < count <= request.max_tokens:
        fault = f"holds {count} tokens of at most {request.max_tokens}"
    elif not len(generation.behaviour_logprobs) == len(generation.model_logprobs) == count:
        fault = "has not one log-probability of each kind per token"
    elif sum([span.length for span in generation.versions]) != count:
        fault = "has policy versions that do not cover its tokens"
    elif (generation.finish is FinishReason.STOP) != output.ended:
        fault = f"says {generation.finish} but its last token says otherwise"
    else:
        return
    raise EngineError(f"the generation for request {request.request_id!r} {fault}; mend the engine")
