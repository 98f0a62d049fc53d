"""Which tasks are run: plans of episodes for updates and for evaluations.

Owns the numbering of issues and the choice of each: environment, then task. Knows no engine and runs nothing.

The choice for an issue is a pure function of (seed, issue, what was heard, what the same update drew before). Tasks
are pure functions of (split, seed, index), so a run that starts again goes on at its high-water mark, and every
evaluation of a run sees the same tasks. Three ways to a training task:

- by default each issue is a new task: the index is the issue;
- ``tasks.num_tasks`` = N: tasks 0..N-1 of each environment, all of them in a new order, over and over;
- with ``tasks.pools`` too: drawn by their difficulty pools (:mod:`hotpot.rollout.pools`).

Invariant: a group is one issue, and an issue is one task of one environment.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hotpot.config.sections import TasksSection
from hotpot.errors import EnvironmentSpecError
from hotpot.rollout.draws import chance, shuffled
from hotpot.rollout.mix import ONLY, Mix, MixedEnvironment
from hotpot.rollout.pools import GroupOutcome, Pool, PoolDraw, Pools
from hotpot.types import Split, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """One episode to run: sample ``sample`` of task issue ``issue``; ``evaluation`` is its number, or None.

    ``environment`` is the task's environment by its name in the mix.
    """

    task: Task
    issue: int
    sample: int
    evaluation: int | None = None
    environment: str = ONLY


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the task of one issue was chosen.

    ``environment`` was drawn with probability ``share``; task ``index`` of it came out of ``pool`` (empty without
    pools) with ``probability`` among its tasks (1 where nothing was left to chance).
    """

    issue: int
    environment: str
    share: float
    index: int
    task_id: str
    pool: str
    probability: float


class TaskSampler:
    """Issues tasks of the training split, and plans evaluations on the hold-out split.

    Parameters
    ----------
    next_issue: first issue number not handed out yet; a run that starts again gives its high-water mark plus one.
    advance: called with the highest number of a batch *before* its plans are returned, so that the mark can be made
        durable and no number is ever used twice.
    num_holdout: hold-out tasks of each environment that evaluations will measure; a training task equal to one of them
        is refused.

    Raises :class:`EnvironmentSpecError` where a task of a finite list is a hold-out task.
    """

    def __init__(
        self,
        mix: Mix,
        *,
        seed: int,
        samples_per_task: int,
        next_issue: int = 0,
        advance: Callable[[int], None] | None = None,
        num_holdout: int = 0,
        settings: TasksSection | None = None,
    ) -> None:
        self._mix = mix
        self._seed = seed
        self._samples = samples_per_task
        self._advance = advance
        self._settings = settings or TasksSection()
        self.next_issue = next_issue
        self._held_out = frozenset(
            member.environment.task(Split.HOLDOUT, seed, index).task_id
            for member in mix
            for index in range(num_holdout)
        )
        self._weights = {pool: getattr(self._settings.pool_weights, pool.value) for pool in Pool}
        self._pools: dict[str, Pools] = {}
        self._known: dict[tuple[str, str, str], tuple[str, int]] = {}
        if self._settings.pools:
            for member in mix:
                self._open_pools(member)
        self._drawn: dict[str, set[int]] = {}
        self._choices: list[Choice] = []

    def issue(self, num_tasks: int) -> list[EpisodePlan]:
        """Return the episodes of the next ``num_tasks`` training tasks, task by task.

        Raises :class:`EnvironmentSpecError` where one of them is a hold-out task: it would be trained on and measured.
        """
        first = self.next_issue
        if self._advance is not None:
            self._advance(first + num_tasks - 1)
        self.next_issue = first + num_tasks
        plans: list[EpisodePlan] = []
        for issue in range(first, first + num_tasks):
            plans += self._episodes(issue, *self._choose(issue))
        return plans

    def _episodes(self, issue: int, member: MixedEnvironment, task: Task) -> list[EpisodePlan]:
        return [
            EpisodePlan(task=task, issue=issue, sample=sample, environment=member.name)
            for sample in range(self._samples)
        ]

    @property
    def samples_per_task(self) -> int:
        """Episodes that are issued of each task."""
        return self._samples

    def again(
        self, issues: Sequence[int], chosen: Mapping[int, tuple[str, int]] | None = None
    ) -> list[EpisodePlan]:
        """Return the episodes of ``issues`` once more, which were handed out before. ``chosen`` has environment and index of
        those that the record tells of: with pools a draw hangs on what was heard since."""
        plans: list[EpisodePlan] = []
        for issue in issues:
            told = (chosen or {}).get(issue)
            if told is None:
                member, task = self._choose(issue)
            else:
                member = self._mix[told[0]]
                task = self._task(member, told[1])
            plans += self._episodes(issue, member, task)
        return plans

    def take_choices(self) -> list[Choice]:
        """Return how the tasks issued since the last call were chosen, where there was a choice at all."""
        choices, self._choices = self._choices, []
        return choices

    def hear(self, outcomes: Iterable[GroupOutcome]) -> None:
        """Take what became of the groups of one update into the pools; the next update begins.

        Tasks of other versions than the mix has now are not its tasks, and are left out.
        """
        self._drawn.clear()
        for outcome in outcomes:
            known = self._known.get((outcome.env_version, outcome.reward_version, outcome.task_id))
            if known is not None:
                name, index = known
                self._pools[name].hear(index, outcome.verdict)

    def pool_sizes(self) -> dict[str, dict[str, int]]:
        """Return how many tasks stand in each pool, by environment; empty without pools."""
        return {
            name: {pool.value: size for pool, size in pools.sizes.items()}
            for name, pools in self._pools.items()
        }

    def holdout(self, evaluation: int, num_tasks: int, *, environment: str = ONLY) -> list[EpisodePlan]:
        """Return one episode of each of the first ``num_tasks`` hold-out tasks of an environment: always the same."""
        bound = self._mix[environment].environment
        return [
            EpisodePlan(
                task=bound.task(Split.HOLDOUT, self._seed, index),
                issue=index,
                sample=0,
                evaluation=evaluation,
                environment=environment,
            )
            for index in range(num_tasks)
        ]

    def _choose(self, issue: int) -> tuple[MixedEnvironment, Task]:
        member, share = self._mix.draw(self._seed, issue)
        drawn = self._index(issue, member.name)
        task = self._task(member, drawn.index)
        if len(self._mix) > 1 or self._settings.num_tasks:
            choice = Choice(
                issue=issue,
                environment=member.name,
                share=share,
                index=drawn.index,
                task_id=task.task_id,
                pool=drawn.pool.value if self._pools else "",
                probability=drawn.probability,
            )
            self._choices.append(choice)
        return member, task

    def _index(self, issue: int, name: str) -> PoolDraw:
        """Return the place of an issue's task in its environment's stream."""
        num_tasks = self._settings.num_tasks
        if name in self._pools:
            taken = self._drawn.setdefault(name, set())
            drawn = self._pools[name].draw(self._weights, chance(self._seed, issue, "task"), taken)
            taken.add(drawn.index)
            return drawn
        index = issue
        if num_tasks:
            index = shuffled(issue % num_tasks, num_tasks, f"{self._seed} {name} {issue // num_tasks}")
        return PoolDraw(index=index, pool=Pool.UNSEEN, probability=1.0)

    def _task(self, member: MixedEnvironment, index: int) -> Task:
        task = member.environment.task(Split.TRAIN, self._seed, index)
        if task.task_id in self._held_out:
            raise EnvironmentSpecError(
                f"training task {index} of environment {member.environment.name!r} ({task.task_id}) is a hold-out "
                "task too; keep the splits disjoint by content (`hotpot env check` looks for it)"
            )
        return task

    def _open_pools(self, member: MixedEnvironment) -> None:
        """Make the pools of an environment; a task that its list holds twice counts once."""
        indices = []
        for index in range(self._settings.num_tasks):
            key = (*member.versions, self._task(member, index).task_id)
            if key not in self._known:
                self._known[key] = (member.name, index)
                indices.append(index)
        self._pools[member.name] = Pools(indices, decay=self._settings.pool_decay)
