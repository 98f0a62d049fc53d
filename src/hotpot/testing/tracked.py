"""A run whose every promise is tracked: operations on a :class:`KillableWriter`, and the model that follows them.

::

    operation ──► KillableWriter ──answer──► Promises      (acknowledged: binding)
                        └──Died─────► Promises.open_*       (under way: all or nothing)
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hotpot.config import StoreSection
from hotpot.experience import RunReader
from hotpot.testing.killable import Died, KillableWriter
from hotpot.testing.promises import Promises, Violations
from hotpot.testing.records import make_group


class TrackedRun:
    """One run under test. Every operation returns whether the process lived through it; after a death call :meth:`start`."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str = "run",
        settings: StoreSection | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder, self.run_id = folder, run_id
        self.promises = Promises()
        self.deaths = 0
        self._settings, self.environment = settings, environment
        self._writer: KillableWriter | None = None
        self._issue = self._update = -1
        self._leased: dict[int, list[int]] = {}
        self._unused: list[str] = []

    @property
    def alive(self) -> bool:
        """Whether a process is there."""
        return self._writer is not None

    def start(self, *, crash_at: tuple[str, int] | None = None, watch: bool = False) -> bool:
        """Start a process that opens, or takes over, the run; ``crash_at`` (place, count) is armed before that."""
        self._writer = KillableWriter(
            self.folder, run_id=self.run_id, settings=self._settings, environment=self.environment
        )
        self._leased.clear()
        try:
            if watch:
                self._writer.ask("watch")
            if crash_at is not None:
                self._writer.ask("arm", place=crash_at[0], count=crash_at[1])
            marks: Mapping[str, int] = self._writer.ask("open")
        except Died:
            return self._died()
        self._issue, self._update = marks["issue"], max(marks["update"], 0)
        return True

    def arm(self, place: str, count: int) -> bool:
        """Die at the ``count``-th passing of ``place`` from now."""
        return self._ask("arm", place=place, count=count)

    def passed(self) -> list[str]:
        """Return the crash points passed since a :meth:`start` with ``watch``."""
        answer: list[str] = self._process.ask("watch")
        return answer

    def lease(self, size: int) -> bool:
        """Lease the attempts of the next issue's group."""
        self._issue += 1
        if not self._ask("lease", issue=self._issue, size=size):
            return False
        self._leased[self._issue] = list(range(size))
        return True

    def append(self, count: int, broken: int = 0) -> bool:
        """Append ``count`` leased trajectories of one issue in one call, the last ``broken`` of them malformed."""
        issue = self._oldest(count)
        first = self._leased[issue][0]
        members = make_group(run_id=self.run_id, issue=issue, size=first + count)[first:]
        good = frozenset(member.row.trajectory_id for member in members[: count - broken])
        bad = [member.row.attempt_id for member in members[count - broken :]]
        try:
            accepted, refused = self._process.ask(
                "append", issue=issue, first=first, count=count, broken=broken
            )
        except Died:
            self.promises.open_groups.append((good, broken))
            return self._died()
        if set(accepted) != good or refused != broken:
            raise AssertionError(f"accepted {accepted}, refused {refused}; expected {sorted(good)}, {broken}")
        self._leased[issue] = self._leased[issue][count:]
        self.promises.kept |= good
        self.promises.refused += broken
        self.promises.ended.update(dict.fromkeys(bad, "dropped"))
        self._unused += sorted(good)
        return True

    def end(self, state: str) -> bool:
        """End one leased attempt as ``failed`` or ``dropped``."""
        issue = self._oldest(1)
        sample = self._leased[issue].pop(0)
        if not self._ask("end", issue=issue, sample=sample, state=state):
            return False
        attempt = make_group(run_id=self.run_id, issue=issue, size=sample + 1)[sample].row.attempt_id
        self.promises.ended[attempt] = state
        return True

    def learn(self, count: int) -> bool:
        """Record an update that consumes up to ``count`` trajectories, fresh ones first, then old ones again."""
        used = [*self._unused, *sorted(self.promises.kept - set(self._unused))][:count]
        self._unused = self._unused[count:]
        self._update += 1
        try:
            self._process.ask("learn", update=self._update, ids=used)
        except Died:
            self.promises.open_updates[self._update] = frozenset(used)
            return self._died()
        self.promises.learned[self._update] = frozenset(used)
        return True

    def note(self) -> bool:
        """Record an event, an evaluation and a version with the next number."""
        number = max([*self.promises.noted, *self.promises.open_notes, -1]) + 1
        try:
            self._process.ask("note", number=number)
        except Died:
            self.promises.open_notes.add(number)
            return self._died()
        self.promises.noted.add(number)
        return True

    def flush(self) -> bool:
        """Wait until everything is in the lake."""
        return self._ask("flush")

    def round(self) -> bool:
        """Do one of everything, as a loop of updates would; False as soon as the process dies."""
        return (
            self.lease(6)
            and self.end("failed")
            and self.append(4, broken=1)
            and self.learn(3)
            and self.note()
        )

    def kill(self) -> None:
        """Kill the process where it is."""
        if self._writer is not None:
            self._writer.kill()
            self._died()

    def close(self) -> bool:
        """End the run in order and the process with it."""
        if not self._ask("close"):
            return False
        self._process.kill()
        self._writer = None
        return True

    def check(self, *, at_rest: bool) -> Violations:
        """Compare the promises with what a reader finds."""
        reader = RunReader.open(self.folder)
        found = self.promises.check(lambda query: reader.sql(query).to_pylist(), at_rest=at_rest)
        self._unused = [one for one in self._unused if one in self.promises.kept]
        return found

    @property
    def can_append(self) -> int:
        """How many trajectories of one issue can be appended now."""
        return max(map(len, self._leased.values()), default=0)

    @property
    def _process(self) -> KillableWriter:
        if self._writer is None:
            raise RuntimeError("start the run first")
        return self._writer

    def _oldest(self, count: int) -> int:
        return next(issue for issue, samples in self._leased.items() if len(samples) >= count)

    def _ask(self, command: str, **arguments: object) -> bool:
        try:
            self._process.ask(command, **arguments)
        except Died:
            return self._died()
        return True

    def _died(self) -> bool:
        self._writer = None
        self._leased.clear()
        self.deaths += 1
        return False
