"""Environments called where they are asked for, one after the other, in one thread.

An environment that hangs hangs the run, which a watchdog ends; threads and processes can do better. Invariant: replies
come in the order of the calls, so a run repeats.
"""

from collections.abc import Callable, Mapping, Sequence

from hotpot.envs import Environment
from hotpot.errors import EnvironmentFailure
from hotpot.rollout import boundary
from hotpot.rollout.actors.calls import ActorState, Call, CallKind, Reply
from hotpot.rollout.clock import Clock
from hotpot.types import Observation, StepResult


class InlineActors:
    """One actor a group. ``make`` has, by its name in the mix, what makes an environment."""

    def __init__(
        self,
        make: Mapping[str, Callable[[], Environment]],
        groups: Sequence[str] = ("group-0",),
        *,
        clock: Clock | None = None,
    ) -> None:
        self._make, self._clock = dict(make), clock or Clock()
        self._actors = {group: f"actor-{index}" for index, group in enumerate(groups)}
        self._progress = dict.fromkeys(self._actors.values(), 0)
        self._open: dict[str, Environment] = {}
        self._replies: list[Reply] = []

    def begin(self, call: Call) -> None:
        """Make the call; its reply waits for :meth:`ready`."""
        began_s = self._clock.now_s()
        answer: Observation | StepResult | None = None
        failure = None
        try:
            answer = self._make_call(call)
        except EnvironmentFailure as error:
            failure = error
        self._progress[call.actor_id] = self._progress.get(call.actor_id, 0) + 1
        self._replies.append(
            Reply(
                kind=call.kind,
                attempt_id=call.attempt_id,
                seconds=self._clock.now_s() - began_s,
                observation=answer if isinstance(answer, Observation) else None,
                result=answer if isinstance(answer, StepResult) else None,
                failure=failure,
            )
        )

    def _make_call(self, call: Call) -> Observation | StepResult | None:
        if call.kind is CallKind.CLOSE:
            if (environment := self._open.pop(call.attempt_id, None)) is not None:
                boundary.close(environment)
            return None
        if call.kind is CallKind.OPEN and call.task is not None:
            environment = self._open[call.attempt_id] = boundary.make(self._make[call.environment])
            return boundary.reset(environment, call.task, call.seed)
        if call.kind is CallKind.STEP and call.action is not None:
            return boundary.step(self._open[call.attempt_id], call.action)
        raise ValueError(f"call {call.kind} of {call.attempt_id} lacks its task or action")

    def ready(self, timeout_s: float) -> list[Reply]:
        """Return the replies that are there. Nothing is ever under way, so there is nothing to wait for."""
        del timeout_s
        found, self._replies = self._replies, []
        return found

    def assign(self, group: str) -> str:
        """Return the group's actor."""
        return self._actors[group]

    def states(self) -> list[ActorState]:
        """Return how each actor stands; calls have always ended."""
        return [
            ActorState(
                actor_id=actor, actor_group=group, progress=self._progress[actor], calls=0, since_s=None
            )
            for group, actor in self._actors.items()
        ]

    def replace(self, actor_id: str, reason: str) -> str:
        """Refuse: there is nothing of its own to end."""
        raise EnvironmentFailure(
            f"{actor_id} runs in the main loop and can't be replaced ({reason}); set actors.kind = 'threads' or 'processes'"
        )

    def close(self) -> None:
        """Close the environments that are open."""
        for environment in self._open.values():
            boundary.close(environment)
        self._open.clear()
