"""What a collection finds done: episodes that an earlier process finished, gave up or left in the middle.

Owns what becomes of a plan then: run anew under the next attempt's number, not run, or run again as *company*. In
deterministic mode an engine's bits depend on who is in a batch with whom, so there the episodes that are settled are run
again beside the others, off the ledger, and what they bring is only compared with what is on record. Knows no store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotpot.ids import episode_id
from hotpot.rollout.tasks import EpisodePlan
from hotpot.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Past:
    """Episodes by id. ``finished``: what they brought is on record. ``lost``: they ended for good without bringing
    anything. ``next_attempts``: number of the next attempt, where it is not 0. ``company``: run settled ones again.
    """

    finished: Mapping[str, Sequence[Trajectory]] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    next_attempts: Mapping[str, int] = field(default_factory=dict)
    company: bool = False

    def next_attempt(self, plan: EpisodePlan) -> int:
        """Return the number of the attempt that ``plan`` is tried under next."""
        return self.next_attempts.get(_episode(plan), 0)

    def settles(self, episode: str) -> bool:
        """Whether nothing new may come of ``episode``."""
        return episode in self.finished or episode in self.lost

    def is_settled(self, plan: EpisodePlan) -> bool:
        """Whether nothing new may come of ``plan``."""
        return self.settles(_episode(plan))

    def to_run(self, plans: Sequence[EpisodePlan]) -> list[EpisodePlan]:
        """Return the plans that are run, in order: all where they keep each other company."""
        return [plan for plan in plans if self.company or not self.is_settled(plan)]

    def brought(self, plans: Sequence[EpisodePlan]) -> list[Trajectory]:
        """Return what is on record of those ``plans`` that are not run."""
        skipped = [] if self.company else plans
        return [trajectory for plan in skipped for trajectory in self.finished.get(_episode(plan), ())]


NOTHING = Past()
"""The past of a collection that begins from nothing."""


def same_experience(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> bool:
    """Return whether both hold the same sampled tokens with the same log-probabilities and rewards, bit for bit."""
    return [_bits(trajectory) for trajectory in one] == [_bits(trajectory) for trajectory in other]


def _bits(trajectory: Trajectory) -> list[tuple[bytes, bytes, bytes, float]]:
    return [
        (
            step.prompt_tokens.tobytes(),
            step.sampled_tokens.tobytes(),
            step.behaviour_logprobs.tobytes(),
            step.reward,
        )
        for step in trajectory.steps
    ]


def _episode(plan: EpisodePlan) -> str:
    return episode_id(plan.issue, plan.sample, evaluation=plan.evaluation)
