"""What the actors bring: from plans to stored trajectories to whole groups, while anything else goes on.

::

    plans ──issue──► rollout ──finished──► (chunks) ──► store ──accepted──► groups ──► complete, to the queue
                        ▲                                                      │
                        └───────────────── cut: the group has enough ◄─────────┘

Owns the run's one collection of training episodes, and when what finished is acknowledged. Knows no learner. One thread;
a turn waits for the engine's step, and for actors no longer than it is told.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from hotpot.ids import episode_id
from hotpot.rollout import NOTHING, EpisodePlan, Past, Rollout
from hotpot.rollout.collection import AttemptEnd
from hotpot.rollout.collector import WAIT_S
from hotpot.topology.collecting.groups import CUT, CompleteGroup, Groups, Turned
from hotpot.topology.collecting.intake import CHUNK, Intake
from hotpot.types import Purpose, Trajectory

KEEP_WITHIN_S = 0.2
"""Longest time that a finished trajectory waits to be acknowledged together with others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Harvested:
    """What came of a turn: groups that are complete or ended with nothing, stored trajectories that no group counts, and
    how attempts ended."""

    complete: tuple[CompleteGroup, ...] = ()
    empty: tuple[str, ...] = ()
    surplus: tuple[Trajectory, ...] = ()
    ends: tuple[AttemptEnd, ...] = ()


@dataclass(slots=True)
class _Pending:
    """Finished, and not acknowledged yet."""

    trajectories: list[Trajectory] = field(default_factory=list)
    since_s: float = 0.0


class Harvest:
    """Training episodes of one run. ``wanted``: how many of a group count. ``keep_within_s``: longest time that something
    finished waits to be acknowledged; 0 acknowledges what finished in each turn."""

    def __init__(self, rollout: Rollout, intake: Intake, *, wanted: int, keep_within_s: float) -> None:
        self.groups = Groups(wanted)
        self._rollout, self._intake, self._keep_within_s = rollout, intake, keep_within_s
        self._work = rollout.begin(Purpose.TRAINING)
        self._pending = _Pending()

    @property
    def waiting(self) -> int:
        """Episodes that wait for a place; those whose environment rests wait for something else."""
        return len(self._work.waiting) + len(self._work.leased) - self.resting

    @property
    def resting(self) -> int:
        """Episodes that wait for their environment to have rested."""
        held = self._rollout.held
        return sum(one.plan.environment in held for one in self._work.waiting) if held else 0

    @property
    def live(self) -> int:
        """Episodes under way."""
        return len(self._work.live)

    @property
    def pending(self) -> int:
        """Trajectories that finished and are not acknowledged yet."""
        return len(self._pending.trajectories)

    def issue(self, plans: Sequence[EpisodePlan], past: Past = NOTHING) -> Harvested:
        """Take ``plans``, whole groups, in line; what an earlier process left of them counts at once (``past``)."""
        self.groups.issue(plans)
        self._rollout.add(self._work, plans, past)
        episodes = {episode_id(plan.issue, plan.sample) for plan in plans}
        return self._come(self.groups.turn(past.brought(plans), past.lost & episodes), [])

    def turn(self, now_s: float, *, wait_s: float, hungry: bool) -> Harvested:
        """Let the rollout do a piece of work, wait at most ``wait_s`` seconds for actors, and take what finished.

        ``hungry``: somebody waits for it, so it is acknowledged now.
        """
        self._rollout.turn(wait_s)
        self._rollout.check_deadline()
        pending = self._pending
        if not pending.trajectories:
            pending.since_s = now_s
        pending.trajectories += self._work.take()
        ends = self._work.take_ends()
        late = now_s - pending.since_s >= self._keep_within_s
        keep = pending.trajectories and (hungry or late or len(pending.trajectories) >= CHUNK)
        lost = [end.episode_id for end in ends if end.given_up]
        return self._come(self._kept(lost) if keep else self.groups.turn((), lost), ends)

    def let_go(self, environments: Collection[str], *, keep: int) -> Harvested:
        """Give up waiting episodes of ``environments`` beyond ``keep``: no attempt at them was made, so they are not on the
        ledger."""
        resting = (
            [one for one in self._work.waiting if one.plan.environment in environments]
            if environments
            else []
        )
        gone = resting[keep:]
        for one in gone:
            self._work.waiting.remove(one)
        lost = [episode_id(one.plan.issue, one.plan.sample) for one in gone]
        return self._come(self.groups.turn((), lost), []) if gone else Harvested()

    def let_through(self, environment: str) -> str | None:
        """Let one attempt at a held environment begin; return its id, None where none waits."""
        return self._rollout.let_through(self._work, environment)

    def close(self) -> Harvested:
        """Acknowledge what finished, and end what is under way: its attempts are dropped."""
        self._pending.trajectories += self._work.take()
        kept = self._kept([])
        self._rollout.end(self._work)
        return Harvested(complete=kept.complete, empty=kept.empty, surplus=kept.surplus)

    def _kept(self, lost: Sequence[str]) -> Turned:
        """Store what is pending. Episodes of which the gate lets nothing in are lost too."""
        finished, self._pending = self._pending.trajectories, _Pending()
        accepted = self._intake.keep(finished)
        let_in = {trajectory.row.episode_id for trajectory in accepted}
        refused = dict.fromkeys(t.row.episode_id for t in finished if t.row.episode_id not in let_in)
        return self.groups.turn(accepted, [*lost, *refused])

    def _come(self, turned: Turned, ends: Sequence[AttemptEnd]) -> Harvested:
        if turned.cut:
            self._rollout.cut(self._work, set(turned.cut), CUT)
        return Harvested(
            complete=turned.complete, empty=turned.empty, surplus=turned.surplus, ends=tuple(ends)
        )


def collect_groups(
    rollout: Rollout, intake: Intake, plans: Sequence[EpisodePlan], *, wanted: int, check: Callable[[], None]
) -> list[Harvested]:
    """Run ``plans`` until each group is complete, and return what came; ``check`` is called in every turn and may raise."""
    harvest = Harvest(rollout, intake, wanted=wanted, keep_within_s=KEEP_WITHIN_S)
    brought: list[Harvested] = []
    try:
        brought.append(harvest.issue(plans, intake.past))
        while harvest.groups.under_way:
            brought.append(harvest.turn(time.monotonic(), wait_s=WAIT_S, hungry=False))
            intake.beat()
            check()
    finally:
        brought.append(harvest.close())
    return brought
