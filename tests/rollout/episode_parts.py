"""Episodes over a fake engine, for the tests of one episode."""

from collections.abc import Callable, Iterable
from typing import Any

from rollout_parts import DIALECTS, PROVENANCE, TOOL, call, make_plan, seen_by_engine

from hotpot.config import ActorsSection, RolloutSection
from hotpot.envs import Environment
from hotpot.experience.gate.gate import check
from hotpot.experience.gate.rules import Limits
from hotpot.rollout import Clock, Dialect, Episode, EpisodeRules
from hotpot.rollout.actors import CallKind, InlineActors
from hotpot.testing.engine import FakeEngine
from hotpot.types import Action, Generation, Purpose, SamplingParams, Trajectory

COMPACT = DIALECTS["compact"]()
CALL = COMPACT.encode_action(call(), "hm", [TOOL])
ANSWER = COMPACT.encode_action(Action(answer="w17"))


class PlayedEpisode(Episode):
    """An episode that makes its own calls, as the collector does for many."""

    def __init__(
        self, plan: Any, *, make_environment: Callable[[], Environment], clock: Clock, **keywords: Any
    ) -> None:
        super().__init__(plan, clock=clock, **keywords)
        self._actors = InlineActors(
            {plan.environment: make_environment}, ActorsSection(), seconds=clock.now_s
        )

    def start(self) -> None:
        self._make(self.opening())

    def receive(self, generation: Generation, *, waited_s: float = 0.0) -> None:
        call = super().receive(generation, waited_s=waited_s)
        if call is not None:
            self._make(call)

    def close(self) -> None:
        self._actors.begin(self.call(CallKind.CLOSE))
        (reply,) = self._actors.ready(0.0)
        if reply.failure is not None:
            raise reply.failure

    def _make(self, call: Any) -> None:
        self._actors.begin(call)
        (reply,) = self._actors.ready(0.0)
        self.resume(reply)


def make_episode(
    environment: Environment | Callable[[], Environment],
    *,
    dialect: Dialect = COMPACT,
    clock: Clock | None = None,
    deterministic: bool = False,
    system: str = "the desk",
    max_context_tokens: int = 512,
    redact: Callable[[str], tuple[str, int]] = lambda text: (text, 0),
    plan: Any = None,
    attempt: int = 0,
    purpose: Purpose = Purpose.TRAINING,
    **limits: Any,
) -> PlayedEpisode:
    rules = EpisodeRules(
        purpose=purpose,
        sampling=SamplingParams(),
        limits=RolloutSection(**limits),
        max_context_tokens=max_context_tokens,
        deterministic=deterministic,
        system_prompt=system,
        redact=redact,
    )
    return PlayedEpisode(
        plan or make_plan(),
        attempt=attempt,
        make_environment=environment if callable(environment) else lambda: environment,
        dialect=dialect,
        rules=rules,
        provenance=PROVENANCE,
        clock=clock or Clock(),
    )


def make_engine(outputs: Iterable[Iterable[int]], **keywords: Any) -> FakeEngine:
    script = iter(outputs)
    return FakeEngine(lambda prompt: next(script), **keywords)


def play(episode: PlayedEpisode, engine: FakeEngine) -> Trajectory:
    """Run an episode to its end, and check what must hold of every trajectory."""
    episode.start()
    while (request := episode.next_request()) is not None:
        assert episode.next_request() is None
        engine.submit(request)
        while not (generations := engine.step()):
            pass
        episode.receive(generations[0])
    trajectory = episode.trajectory()
    episode.close()
    assert check(trajectory, Limits(run_id="run", vocabulary_size=512)) is None
    seen = seen_by_engine(trajectory.steps)
    assert [context.tolist() for context in seen] == [
        r.prompt.tolist() for r in engine.submitted[-len(seen) :]
    ]
    return trajectory
