"""An update done over from the record: the state before it, its batch, the learning of it again, the comparison.

::

    checkpoint ─► learner ─► every update on the way, from the record ─► the state before update N
                                                                             │ (a copy, where something is changed)
    lake, log ─► batch of N ─► (rewards recomputed) ─────────────────────► learn ─► row as it would be recorded ─► compare

Owns the order of it, and how far a learner has come. Reads the run folder and writes nothing into it, holds no lock and
needs no environment and no inference, so that a run may go on meanwhile.

Invariants: an update is learned from the state its record started from, never from one with changed settings or rewards;
settings in force are those recorded with each update, whatever the run was told later.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from hotpot.errors import ModelFilesError, UsageError
from hotpot.experience import RunReader
from hotpot.learner import Learner, UpdateResult
from hotpot.models import keep_freed_memory, use_threads
from hotpot.topology.redo.findings import Findings, compare_rows
from hotpot.topology.redo.learners import Learners, weights_checksum
from hotpot.topology.redo.rewards import RewardFindings, RewardFunction, compare_rewards, rewarded
from hotpot.topology.redo.terms import Terms
from hotpot.topology.redo.way import Way, wanted_updates, way_to
from hotpot.topology.resume.checkpoints import checkpoint_folder, list_checkpoints
from hotpot.topology.resume.history import last_recipe
from hotpot.topology.resume.rebuild import policy_checksums, rebuild_batch, recorded_update, relearn
from hotpot.topology.updates import rows
from hotpot.topology.updates.batch import UpdateBatch
from hotpot.types import UpdateRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What is done otherwise than recorded: settings (``section.key=value``), rewards."""

    settings: tuple[str, ...] = ()
    reward: RewardFunction | None = None

    @property
    def any(self) -> bool:
        """Whether there is something."""
        return bool(self.settings) or self.reward is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Redone:
    """One update done over.

    ``way``: the checkpoint it was come to from, and what was learned for it. ``off_at``: the first update on the way
    whose weights did not come out as recorded, None where all did. ``gone``: trajectories of the update that the record
    no longer holds. ``rewards`` where they were recomputed.
    """

    update: int
    way: Way
    findings: Findings
    off_at: int | None
    gone: tuple[str, ...]
    rewards: RewardFindings | None
    seconds: float


def redo(folder: Path, updates: str, changes: Changes | None = None) -> Iterator[Redone]:
    """Do the updates of the run in ``folder`` over that ``updates`` names ("3", "3..7", "all"), ascending.

    With ``changes`` each of them is learned from its recorded state under them. Raises :class:`UsageError` in its forms
    where an update is not recorded, not provable, or has no checkpoint before it; :class:`LearnerError` where what is
    changed can't be learned.
    """
    doing = _Doing(folder)
    for number in wanted_updates(updates, list(doing.parents)):
        with _threads_kept():
            yield doing.over(number, changes or Changes())


class _Doing:
    """One run, and how far a learner has come in it: ``_learner`` has the weights after update ``_at``."""

    def __init__(self, folder: Path) -> None:
        keep_freed_memory()
        self._folder, self._reader = folder, RunReader.open(folder)
        recorded = self._reader.table("updates", ["update", "parent_update"]).to_pylist()
        self.parents: Mapping[int, int] = {row["update"]: row["parent_update"] for row in recorded}
        self._recipe = last_recipe(folder)
        told = self._recipe.get("model", {})
        model = Path(told["path"]) if told.get("path") else None
        self._learners = Learners(folder, model, told.get("implementation", "auto"))
        self._learner: Learner | None = None
        self._terms: Terms | None = None
        self._at = 0
        self._off_at: int | None = None

    @cached_property
    def _checksums(self) -> Mapping[int, str]:
        return policy_checksums(self._reader)

    def over(self, number: int, changes: Changes) -> Redone:
        """Do update ``number`` over."""
        started, row = time.monotonic(), self._row(number)
        terms = Terms.of(row)
        way = self._come_before(number)
        learner, batch = self._ready(row), rebuild_batch(self._reader, number)
        starting = (self._checksums.get(row.policy_version, ""), weights_checksum(learner))
        off_at, rewards = self._off_at, None
        if changes.any:
            terms = terms.under(changes.settings, self._recipe)
            learner = self._learners.under(learner, terms)
            use_threads(terms.num_threads)
            if changes.reward is not None:
                batch, rewards = rewarded(batch, changes.reward, self._reader, self._learners.tokenizer())
        result = _learned(learner, batch, row)
        redone = _redone_row(row, batch, result, weights_checksum(learner))
        if not changes.any:
            self._arrive(row, redone.weights_checksum)
        return Redone(
            update=number,
            way=way,
            findings=compare_rows(row, redone, starting=starting),
            off_at=off_at,
            gone=_gone(row, batch),
            rewards=None if rewards is None else compare_rewards(self._reader, number, rewards, result),
            seconds=time.monotonic() - started,
        )

    def _come_before(self, number: int) -> Way:
        """Bring the learner to the state before ``number``; return the way it would take from the checkpoint."""
        lost: set[int] = set()
        while True:
            # A living run takes checkpoints away: the way is laid anew where one went meanwhile.
            kept = set(list_checkpoints(self._folder)) - lost
            way = way_to(number, self.parents, kept)
            before = (way.start, *way.updates[:-1])
            try:
                better = self._off_at is not None and way.start >= self._off_at
                if self._learner is None or self._at not in before or better:
                    self._load(way.start, self._row(way.updates[0]))
                break
            except ModelFilesError:
                if checkpoint_folder(self._folder, way.start).is_dir():
                    raise
                lost.add(way.start)
        for update in before[before.index(self._at) + 1 :]:
            row = self._row(update)
            learner = self._ready(row)
            _learned(learner, rebuild_batch(self._reader, update), row)
            self._arrive(row, weights_checksum(learner))
        return way

    def _row(self, update: int) -> UpdateRow:
        return recorded_update(self._reader, update)

    def _load(self, checkpoint: int, row: UpdateRow) -> None:
        terms = Terms.of(row)
        self._learner, self._terms = self._learners.at(checkpoint, terms), terms
        self._at, self._off_at = checkpoint, None

    def _ready(self, row: UpdateRow) -> Learner:
        """Return the learner under the terms of ``row``, with its threads."""
        terms = Terms.of(row)
        if self._learner is None:
            raise RuntimeError("a learner is loaded before an update is learned")
        if terms != self._terms:
            self._learner, self._terms = self._learners.under(self._learner, terms), terms
        use_threads(terms.num_threads)
        return self._learner

    def _arrive(self, row: UpdateRow, checksum: str) -> None:
        """Note that ``row`` was learned, and where its weights are the first that are not the recorded ones."""
        self._at = row.update
        if checksum != row.weights_checksum and self._off_at is None:
            self._off_at = row.update


def _learned(learner: Learner, batch: UpdateBatch, row: UpdateRow) -> UpdateResult:
    if not batch.trajectories:
        raise UsageError(
            f"the record holds no trajectory of update {row.update} any more; its batch can't be rebuilt"
        )
    before = row.update - 1 - row.lost_updates
    return relearn(learner, batch, policy_version=row.policy_version, before=before, state=row.learner_state)


def _redone_row(row: UpdateRow, batch: UpdateBatch, result: UpdateResult, checksum: str) -> UpdateRow:
    """Return the row that ``result`` would be recorded with in the place of ``row``."""
    frame = rows.UpdateFrame(
        run_id=row.run_id,
        parent_update=row.parent_update,
        new_policy_version=row.new_policy_version,
        started_us=row.started_us,
        seconds={},
        seed=row.seed,
        weights_checksum=checksum,
        deterministic=row.deterministic,
    )
    return rows.update_row(frame, batch, result)


def _gone(row: UpdateRow, batch: UpdateBatch) -> tuple[str, ...]:
    held = {trajectory.row.trajectory_id for trajectory in batch.trajectories}
    held |= {peer.trajectory_id for peer in batch.peers()}
    named = (*row.collected_trajectories, *row.drawn_trajectories, *row.peer_trajectories)
    return tuple(name for name in dict.fromkeys(named) if name not in held)


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Give the process its number of threads back afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
