"""From plans to stored trajectories: the rollout and the store, joined.

::

    plans ──► rollout ──finished──► (chunks) ──► store ──accepted──► whoever asked
      ▲                                                                  ▲
      └── what an earlier process left of the same plans (``past``) ─────┘

Owns the chunking (one fsync a chunk) and the promise that everything finished is acknowledged before control returns,
also when the operator stops the run half-way. Training and evaluation both collect through here.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hotpot.errors import StoreError
from hotpot.experience import ExperienceStore
from hotpot.experience.crashpoints import reach
from hotpot.models import use_threads
from hotpot.observability.live import LiveView
from hotpot.rollout import NOTHING, EpisodePlan, Past, Rollout, same_experience
from hotpot.timeline import Timeline
from hotpot.topology.supervision.stopping import StopSignal
from hotpot.types import Purpose, Trajectory

CHUNK = 32
"""Finished trajectories that are acknowledged together."""


@dataclass(slots=True)
class IntakeCounts:
    """What was accepted in the run: trajectories by kind, and tokens of the training ones (given and sampled)."""

    training: int = 0
    evaluation: int = 0
    tokens: int = 0
    sampled_tokens: int = 0


class Intake:
    """Collects and stores. ``num_threads``: threads the engine computes with; ``counts``: what was accepted before.

    ``turn`` hears, in every turn, a number that grows with what was done (a watchdog does).
    ``past`` is what is settled of the update that an earlier process was in. ``differing``: trajectories on record that
    came out otherwise when they were run again as company; the recorded ones count.
    """

    def __init__(
        self,
        rollout: Rollout,
        store: ExperienceStore,
        timeline: Timeline,
        stop: StopSignal,
        view: LiveView,
        *,
        num_threads: int,
        counts: IntakeCounts | None = None,
        past: Past = NOTHING,
        turn: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.past, self.differing = past, list[str]()
        self.counts = counts or IntakeCounts()
        self._rollout, self._store, self._timeline = rollout, store, timeline
        self._stop, self._view = stop, view
        self._quarantined = 0
        self._refusals: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._num_threads = num_threads
        self._turn = turn
        self._sampled_at = (0, 0)

    def stream(self, plans: Sequence[EpisodePlan], purpose: Purpose) -> Iterator[list[Trajectory]]:
        """Run ``plans`` and yield what the store accepted, chunk by chunk, in the order of finishing.

        Raises :class:`hotpot.topology.supervision.stopping.StopRequested` at the next engine step after a signal.
        """
        use_threads(self._num_threads)
        past = self.past if purpose is Purpose.TRAINING else NOTHING
        pending: list[Trajectory] = []
        known = past.brought(plans)
        try:
            for finished in self._rollout.collect(plans, purpose, past):
                for trajectory in finished:
                    if past.settles(trajectory.row.episode_id):
                        known += self._on_record(trajectory, past)
                    else:
                        pending.append(trajectory)
                if len(pending) >= CHUNK:
                    chunk, pending = pending, []
                    yield self.keep(chunk)
                self.beat()
                self._stop.check()
        finally:
            kept = self.keep(pending)
        if known or kept:
            yield known + kept

    def collect(self, plans: Sequence[EpisodePlan], purpose: Purpose) -> list[Trajectory]:
        """Run ``plans`` and return everything the store accepted, now or before; raises as :meth:`stream`."""
        found = [trajectory for chunk in self.stream(plans, purpose) for trajectory in chunk]
        reach("collected")
        return found

    def beat(self) -> None:
        """Tell the watchdog how far collecting is, by the engine's steps and the replies of actors; replace broken actors,
        which take no calls any more.
        """
        counts, actors = self._rollout.counts, self._rollout.actors
        self._turn(counts.engine_steps + counts.replies)
        for state in actors.states():
            if state.broken:
                fresh = actors.replace(state.actor_id, "it took no calls any more")
                self._view.message(f"{state.actor_id} took no calls any more; {fresh} is in its place")

    def _on_record(self, company: Trajectory, past: Past) -> list[Trajectory]:
        """Return what is on record of an episode that was run again."""
        recorded = past.finished.get(company.row.episode_id, ())
        if recorded and not same_experience(recorded[:1], [company]):
            self.differing.append(recorded[0].row.trajectory_id)
        return list(recorded)

    def queue_depth(self) -> float | None:
        """Return the mean number of requests in the engine, waiting and running, since this was asked last."""
        counts, (steps, requests) = self._rollout.counts, self._sampled_at
        self._sampled_at = (counts.engine_steps, counts.requests_in_engine)
        if counts.engine_steps == steps:
            return None
        return (counts.requests_in_engine - requests) / (counts.engine_steps - steps)

    def losses(self) -> dict[str, float]:
        """Return, as gauges, what did not become a trajectory of this process: failed tries, dropped episodes, refusals."""
        counts = self._rollout.counts
        return {
            "system/failed_attempts": sum(counts.failures.values()),
            "system/dropped_episodes": counts.dropped,
            "system/quarantined_trajectories": self._quarantined,
            "system/close_failures": sum(counts.close_failures.values()),
            "system/redactions": counts.redactions,
        }

    def failures(self) -> str:
        """Return the reasons of failed tries with their counts, the commonest first."""
        found = self._rollout.counts.failures.most_common(3)
        return "; ".join(f"{number} x {reason}" for reason, number in found) or "no try failed"

    def keep(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Append ``trajectories`` to the store; return those it accepted.

        Raises :class:`StoreError` where the breaker of every producer is open: nothing is coming in to learn from.
        """
        if not trajectories:
            return []
        with self._timeline.span("store", whole=True):
            report = self._store.append(trajectories)
        reach("kept")
        accepted = set(report.accepted)
        self._quarantined += len(report.quarantined)
        for (trajectory_id, reason), detail in zip(report.quarantined, report.details, strict=True):
            self._refusals[reason] += 1
            self._examples.setdefault(reason, f"{trajectory_id}: {detail}")
            self._view.message(f"trajectory {trajectory_id} went to quarantine: {reason}")
        kept = [trajectory for trajectory in trajectories if trajectory.row.trajectory_id in accepted]
        for trajectory in kept:
            row = trajectory.row
            if row.purpose == Purpose.TRAINING:
                self.counts.training += 1
                self.counts.tokens += row.num_prompt_tokens + row.num_sampled_tokens
                self.counts.sampled_tokens += row.num_sampled_tokens
            else:
                self.counts.evaluation += 1
        if report.all_open:
            raise StoreError(self._all_open(report.open_producers))
        return kept

    def _all_open(self, producers: Sequence[str]) -> str:
        counted = [each for each in self._refusals.most_common() if each[0] != "breaker_open"]
        reason = counted[0][0] if counted else "breaker_open"
        return (
            f"the gate refuses most of what every producer brings ({', '.join(producers)}), so there is nothing to learn "
            f"from; refused: {', '.join(f'{number} x {name}' for name, number in counted)}; for example "
            f"{self._examples.get(reason, '')}; mend that and resume the run; `hotpot lake quarantine list` shows them all"
        )
