"""Which tasks are run: plans of episodes for updates and for evaluations.

Owns the numbering of issues. Knows no engine and runs nothing. Tasks are pure functions of (split, seed, index), so a
run that starts again goes on at its high-water mark, and every evaluation of a run sees the same tasks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hotpot.envs import BoundEnvironment
from hotpot.errors import EnvironmentSpecError
from hotpot.types import Split, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """One episode to run: sample ``sample`` of task issue ``issue``; ``evaluation`` is its number, or None."""

    task: Task
    issue: int
    sample: int
    evaluation: int | None = None


class TaskSampler:
    """Issues tasks of the training split, and plans evaluations on the hold-out split.

    Parameters
    ----------
    next_issue: first issue number not handed out yet; a run that starts again gives its high-water mark plus one.
    advance: called with the highest number of a batch *before* its plans are returned, so that the mark can be made
        durable and no number is ever used twice.
    num_holdout: hold-out tasks that evaluations will measure; a training task equal to one of them is refused.
    """

    def __init__(
        self,
        environment: BoundEnvironment,
        *,
        seed: int,
        samples_per_task: int,
        next_issue: int = 0,
        advance: Callable[[int], None] | None = None,
        num_holdout: int = 0,
    ) -> None:
        self._environment = environment
        self._seed = seed
        self._samples = samples_per_task
        self._advance = advance
        self.next_issue = next_issue
        self._held_out = frozenset(
            environment.task(Split.HOLDOUT, seed, index).task_id for index in range(num_holdout)
        )

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
            task = self._environment.task(Split.TRAIN, self._seed, issue)
            if task.task_id in self._held_out:
                raise EnvironmentSpecError(
                    f"training task {issue} of environment {self._environment.name!r} ({task.task_id}) is a hold-out "
                    "task too; keep the splits disjoint by content (`hotpot env check` looks for it)"
                )
            plans += [EpisodePlan(task=task, issue=issue, sample=sample) for sample in range(self._samples)]
        return plans

    def holdout(self, evaluation: int, num_tasks: int) -> list[EpisodePlan]:
        """Return one episode of each of the first ``num_tasks`` hold-out tasks: the same ones every time."""
        return [
            EpisodePlan(
                task=self._environment.task(Split.HOLDOUT, self._seed, index),
                issue=index,
                sample=0,
                evaluation=evaluation,
            )
            for index in range(num_tasks)
        ]
