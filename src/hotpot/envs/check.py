"""Checking an environment against its contract, without a model.

Runs whatever a plug-in author wrote and reports what breaks the contract as findings; it raises nothing of the
plug-in's own. Knows nothing of any particular environment.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from hotpot.envs.base import BoundEnvironment
from hotpot.envs.demonstrate import MAX_STEPS, demonstrate, replay
from hotpot.envs.registry import bind
from hotpot.errors import EnvironmentFailure
from hotpot.ids import canonical_json
from hotpot.types import Action, Message, Observation, Role, Split, StepResult, Task, ToolCall


class Level(StrEnum):
    """How bad a finding is. An error breaks the contract; a warning is legal and probably not meant."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One breach: which rule, how bad, and what was seen."""

    rule: str
    level: Level
    detail: str

    def __str__(self) -> str:
        return f"{self.level.value} {self.rule}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the rules look at: the environment, a seed, and tasks of both splits by their index."""

    env: BoundEnvironment
    seed: int
    tasks: dict[Split, tuple[Task, ...]]
    num_episodes: int

    def episodes(self) -> Iterator[Task]:
        """Yield the tasks whose episodes are run, from both splits in turn."""
        pairs = zip(*self.tasks.values(), strict=True)
        return itertools.islice(itertools.chain.from_iterable(pairs), self.num_episodes)


Rule = Callable[[Sample], Iterator[Finding]]


def check_environment(
    env: BoundEnvironment, *, num_tasks: int = 64, num_episodes: int = 16, seed: int = 0
) -> list[Finding]:
    """Check ``env`` on ``num_tasks`` tasks of each split and ``num_episodes`` episodes; no finding: it keeps the contract.

    An exception of the plug-in becomes a finding of the rule that met it. Both counts are at least 1.
    """
    try:
        tasks = {split: tuple(env.task(split, seed, index) for index in range(num_tasks)) for split in Split}
    except Exception as error:  # noqa: BLE001 - reported
        return [_broke("tasks", error)]
    sample = Sample(env=env, seed=seed, tasks=tasks, num_episodes=num_episodes)
    findings: list[Finding] = []
    for name, rule in RULES.items():
        try:
            findings += rule(sample)
        except Exception as error:  # noqa: BLE001 - reported
            findings.append(_broke(name, error))
    return findings


def check_versions(sample: Sample) -> Iterator[Finding]:
    """Versions and the system prompt are the same when computed again, and cover everything."""
    env = sample.env
    params = env.params.model_dump()
    again = bind(env.spec, params, allow_unverifiable=True)
    for old, new in ((env.env_version, again.env_version), (env.reward_version, again.reward_version)):
        if old.version.split("~")[0] != new.version:
            yield _error(
                "versions", f"{old} is {new} when computed again; write nothing into the package folder"
            )
        if json.loads(old.manifest)["unverifiable"]:
            yield _warning("versions", f"{old} is unverifiable: {json.loads(old.manifest)['unverifiable']}")
    if not env.system_prompt() or env.system_prompt() != env.system_prompt():
        yield _error("versions", "the system prompt is empty or differs from call to call")


def check_tasks(sample: Sample) -> Iterator[Finding]:
    """Tasks are pure, in canonical form, of the right name and split, verified, and mostly distinct."""
    env = sample.env
    for split, tasks in sample.tasks.items():
        for index, task in enumerate(tasks):
            if env.task(split, sample.seed, index) != task:
                yield _error(
                    "tasks",
                    f"{split.value} task {index} differs when drawn again; draw from its arguments only",
                )
            if task.env != env.name or task.split is not split:
                yield _error(
                    "tasks", f"{split.value} task {index} says env {task.env!r}, split {task.split!r}"
                )
            if canonical_json(json.loads(task.content)) != task.content:
                yield _error(
                    "tasks", f"{split.value} task {index} is not canonical JSON; write it with canonical_json"
                )
            env.verify(task)
        distinct = len({task.task_id for task in tasks})
        if distinct < len(tasks):
            yield _warning("tasks", f"{split.value} repeats tasks: {distinct} distinct of {len(tasks)}")
        if len(tasks) > 1 and all(
            env.task(split, sample.seed + 1, index) == task for index, task in enumerate(tasks)
        ):
            yield _warning("tasks", f"the {split.value} stream is the same under another seed")


def check_splits(sample: Sample) -> Iterator[Finding]:
    """No content hash, and no key that is held apart, occurs in both splits."""
    env, apart = sample.env, sample.env.spec.held_apart
    train, holdout = sample.tasks[Split.TRAIN], sample.tasks[Split.HOLDOUT]
    shared = {task.task_id for task in train} & {task.task_id for task in holdout}
    if shared:
        yield _error("splits", f"{len(shared)} tasks are in both splits, first {min(shared)}")
    if apart is not None:
        sides = [{key for task in side for key in apart(env.params, task)} for side in (train, holdout)]
        if sides[0] & sides[1]:
            yield _error(
                "splits", f"{sorted(sides[0] & sides[1])[:3]} occur in both splits, and are to be held apart"
            )


def check_episodes(sample: Sample) -> Iterator[Finding]:
    """Observations and step results have the right form, the demonstrator ends, and a replay shows the same."""
    for task in sample.episodes():
        actions = _actions(sample, task)
        first = replay(sample.env, task, sample.seed, actions)
        yield from _check_observation(first[0])
        for result in first[1]:
            yield from _check_result(result)
        if not first[1][-1].done:
            yield _error("episodes", f"task {task.task_id} did not end on an answer or with its demonstrator")
        if replay(sample.env, task, sample.seed, actions) != first:
            yield _error(
                "determinism", f"task {task.task_id}: the same actions show something else in a second run"
            )


def check_isolation(sample: Sample) -> Iterator[Finding]:
    """Two environments stepped in turn show what each shows alone: nothing is shared between them."""
    tasks = tuple(itertools.islice(sample.episodes(), 2))
    plans = [_actions(sample, task) for task in tasks]
    alone = [replay(sample.env, task, sample.seed, plan)[1] for task, plan in zip(tasks, plans, strict=True)]
    worlds = [sample.env.make() for _ in tasks]
    together: list[list[StepResult]] = [[] for _ in tasks]
    try:
        for world, task in zip(worlds, tasks, strict=True):
            world.reset(task, sample.seed)
        for turn in range(max(map(len, alone))):
            for world, plan, seen, length in zip(worlds, plans, together, map(len, alone), strict=True):
                if turn < length:
                    seen.append(world.step(plan[turn]))
    finally:
        for world in worlds:
            world.close()
    if together != alone:
        yield _error(
            "isolation", "two environments stepped in turn influence each other; keep state in the instance"
        )


def check_bad_actions(sample: Sample) -> Iterator[Finding]:
    """Whatever a model writes is answered with an error message and the episode goes on."""
    task = next(sample.episodes())
    world = sample.env.make()
    try:
        observation = world.reset(task, sample.seed)
        calls = [ToolCall(name=name, arguments="{}") for name in ("no_such_tool", "", "\ud800")]
        for tool in observation.tools:
            calls += [ToolCall(name=tool.name, arguments=text) for text in BAD_ARGUMENTS]
        actions = [Action(malformed="no closing parenthesis"), *(Action(tool_call=call) for call in calls)]
        for action in actions:
            result = world.step(action)
            if result.done or not _are_messages(result.messages, (Role.TOOL,)) or not result.tool_error:
                yield _error("bad_actions", f"{action} must be answered by tool messages with tool_error set")
    finally:
        world.close()


def check_single_use(sample: Sample) -> Iterator[Finding]:
    """A second reset, and a step before the first or after the end, raise EnvironmentFailure."""
    task = next(sample.episodes())
    actions = _actions(sample, task)
    for fault, misuse in (
        ("a step before the reset", (0, 0, 1)),
        ("a second reset", (2, 0, 0)),
        ("a step after the end", (1, len(actions), 1)),
    ):
        resets, steps, extra = misuse
        world = sample.env.make()
        try:
            for _ in range(resets):
                world.reset(task, sample.seed)
            for action in actions[:steps]:
                world.step(action)
            for _ in range(extra):
                world.step(Action(answer="0"))
        except EnvironmentFailure:
            continue
        finally:
            world.close()
        yield _warning("single_use", f"{fault} passes unnoticed; raise EnvironmentFailure")


RULES: dict[str, Rule] = {
    "versions": check_versions,
    "tasks": check_tasks,
    "splits": check_splits,
    "episodes": check_episodes,
    "isolation": check_isolation,
    "bad_actions": check_bad_actions,
    "single_use": check_single_use,
}
"""Every rule by its name, in the order they run."""

BAD_ARGUMENTS = ("", "null", "[1]", '{"no_such_argument":1}', '{"a":', '{"\\ud800":"\\ud800"}')
"""Argument texts no tool takes."""


def _actions(sample: Sample, task: Task) -> list[Action]:
    """Return the demonstrator's actions; without a demonstrator a malformed call and an answer."""
    if sample.env.spec.demonstrator is None:
        return [Action(malformed="nothing"), Action(answer="0")]
    return [step.action for step in demonstrate(sample.env, task, sample.seed, max_steps=MAX_STEPS).exchanges]


def _check_observation(observation: object) -> Iterator[Finding]:
    if not isinstance(observation, Observation) or not _are_messages(observation.messages, (Role.USER,)):
        yield _error(
            "episodes", f"reset must return an Observation with user messages only, got {observation!r}"
        )
        return
    names = [tool.name for tool in observation.tools]
    if len(set(names)) < len(names):
        yield _error("episodes", f"tool names repeat: {names}")
    for tool in observation.tools:
        schema = json.loads(tool.parameters)
        if not isinstance(schema, dict) or schema.get("type") != "object":
            yield _error("episodes", f"parameters of tool {tool.name} must be a JSON schema of an object")


def _check_result(result: object) -> Iterator[Finding]:
    if not isinstance(result, StepResult):
        yield _error("episodes", f"step must return a StepResult, got {result!r}")
        return
    if not result.done and not _are_messages(result.messages, (Role.TOOL, Role.USER)):
        yield _error(
            "episodes", f"a step that goes on must return tool or user messages, got {result.messages!r}"
        )
    names = [reward.name for reward in result.rewards]
    if len(set(names)) < len(names) or not all(math.isfinite(reward.value) for reward in result.rewards):
        yield _error(
            "episodes", f"reward components must be finite and named once each, got {result.rewards!r}"
        )


def _are_messages(messages: object, roles: tuple[Role, ...]) -> bool:
    if not isinstance(messages, tuple) or not messages:
        return False
    return all(
        isinstance(message, Message) and message.role in roles and _is_text(message.content + message.name)
        for message in messages
    )


def _is_text(text: str) -> bool:
    """Return whether a text can be stored: a lone surrogate, which JSON can spell, cannot."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def _broke(rule: str, error: Exception) -> Finding:
    return _error(rule, f"{type(error).__name__}: {error}")


def _error(rule: str, detail: str) -> Finding:
    return Finding(rule=rule, level=Level.ERROR, detail=detail)


def _warning(rule: str, detail: str) -> Finding:
    return Finding(rule=rule, level=Level.WARNING, detail=detail)
