"""Collections over a fake engine and the echo environment, for the tests of the collector."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from rollout_parts import PROVENANCE, compact_tokenizer

from hotpot.config import ActorsSection, RolloutSection
from hotpot.envs import BoundEnvironment
from hotpot.experience.log.ledger import Lease
from hotpot.rollout import ONLY, Clock, Dialect, EpisodePlan, Mix, Rollout, Scene, TaskSampler
from hotpot.rollout.actors import InlineActors
from hotpot.testing.environments import echo_environment
from hotpot.timeline import Timeline
from hotpot.types import (
    Action,
    Purpose,
    SamplingParams,
    ToolCall,
    Trajectory,
)

DIALECT = Dialect(compact_tokenizer())
SAMPLING = {Purpose.TRAINING: SamplingParams(), Purpose.EVALUATION: SamplingParams(), Purpose.EVALUATION_GREEDY: SamplingParams(temperature=0.0)}  # fmt: skip
TOOL_ID = DIALECT.tokenizer.special_ids["<|tool|>"]


def obedient(prompt: np.ndarray) -> list[int]:
    """Call echo with the word, then answer the word: reads the prompt, as a model must."""
    text = DIALECT.tokenizer.decode(prompt)
    word = text.split("say ")[-1].split("<")[0]
    if TOOL_ID in prompt:
        return DIALECT.encode_action(Action(answer=word)).tolist()
    return DIALECT.encode_action(
        Action(tool_call=ToolCall(name="echo", arguments=f'{{"text":"{word}"}}'))
    ).tolist()


class Log:
    """Keeps what it is told; every attempt must end at most once."""

    def __init__(self) -> None:
        self.leased: list[str] = []
        self.blocks: list[int] = []
        self.failed: dict[str, str] = {}
        self.dropped: dict[str, str] = {}

    def lease(self, leases: Sequence[Lease]) -> None:
        self.blocks.append(len(leases))
        self.leased += [lease.attempt_id for lease in leases]
        assert len(set(self.leased)) == len(self.leased)

    def fail(self, attempt_id: str, reason: str) -> None:
        self._end(self.failed, attempt_id, reason)

    def drop(self, attempt_id: str, reason: str) -> None:
        self._end(self.dropped, attempt_id, reason)

    def _end(self, ends: dict[str, str], attempt_id: str, reason: str) -> None:
        assert attempt_id in self.leased
        assert attempt_id not in {**self.failed, **self.dropped}
        ends[attempt_id] = reason


def make_rollout(
    engine: Any,
    environment: BoundEnvironment | None = None,
    *,
    log: Any = None,
    clock: Clock | None = None,
    sampling: Any = None,
    timeline: Timeline | None = None,
    deadline_s: float = 10.0,
    redact: Callable[[str], tuple[str, int]] = lambda text: (text, 0),
    **settings: Any,
) -> Rollout:
    environment = environment or echo_environment()
    scene = Scene(environment=environment, system_prompt=environment.system_prompt(), provenance=PROVENANCE)
    return Rollout(
        engine,
        {ONLY: scene},
        DIALECT,
        RolloutSection(**settings),
        sampling=sampling or SAMPLING,
        attempts=Log() if log is None else log,
        redact=redact,
        timeline=timeline or Timeline(),
        actors=InlineActors({ONLY: environment.make}, ActorsSection(), seconds=(clock or Clock()).now_s),
        clock=clock,
        deadline_s=deadline_s,
    )


def make_plans(num_tasks: int = 4, samples: int = 3) -> list[EpisodePlan]:
    return TaskSampler(Mix.of(echo_environment()), seed=7, samples_per_task=samples).issue(num_tasks)


def flat(batches: Iterator[list[Trajectory]]) -> list[Trajectory]:
    return [trajectory for batch in batches for trajectory in batch]


def recorded(trajectories: list[Trajectory]) -> list[tuple[Any, ...]]:
    """Return what must be equal in two runs: everything but times."""
    return [
        (
            t.row.trajectory_id,
            t.row.reward,
            t.row.end_reason,
            s.prefix_hash,
            s.sampled_tokens.tolist(),
            s.span_stage,
        )
        for t in trajectories
        for s in t.steps
    ]
