"""From the last checkpoint to the last recorded update, without inference: what was learned is learned again.

::

    checkpoint ──► for each recorded update on top of it: rebuild its batch, learn it, compare ──► weights of the last

Owns which updates are on the way and when to stop believing. The record is not touched: an update that was recorded is
not recorded again. Acts on the learner it is given; the caller keeps what comes of it.

Invariant: the learner is left in the state of an update whose batch came out as recorded, hash for hash.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hotpot.errors import LearnerError
from hotpot.experience import RunReader
from hotpot.experience.crashpoints import reach
from hotpot.learner import Learner
from hotpot.models import checksum, use_threads
from hotpot.topology.resume.rebuild import compare, policy_checksums, rebuild_batch, relearn
from hotpot.types import UpdateRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rolled:
    """How far it went: ``updates`` learned again, in order. ``differences`` are in words; with ``failed`` they are why
    that update could not be learned as recorded, without it only the rounding was another."""

    updates: tuple[UpdateRow, ...]
    failed: int | None = None
    differences: tuple[str, ...] = ()


def on_the_way(recorded: Sequence[UpdateRow], start: int, *, after: int) -> list[UpdateRow]:
    """Return the updates numbered above ``after`` that were recorded one on top of the other from ``start`` on."""
    found: list[UpdateRow] = []
    at = start
    for row in sorted(recorded, key=lambda row: row.update):
        if row.update > after and row.parent_update == at:
            found.append(row)
            at = row.update
    return found


def roll_forward(
    make_learner: Callable[[], Learner], reader: RunReader, rows: Sequence[UpdateRow], *, before: int
) -> tuple[Learner, Rolled]:
    """Return a learner that has learned ``rows`` again, as far as they come out as recorded, and how that went.

    ``make_learner`` returns one in the state of the parent of the first, with ``before`` updates behind it; it is called
    again where an update fails, since a learner that has learned wrongly is of no more use.
    """
    learner, sums, rounding = make_learner(), policy_checksums(reader), list[str]()
    for place, row in enumerate(rows):
        differences, good = _again(learner, reader, row, before + place, sums.get(row.new_policy_version))
        reach("rolled_forward")
        if not good:
            # Where kernels don't repeat themselves, what was as recorded a moment ago may not be so now.
            learner, kept = roll_forward(make_learner, reader, rows[:place], before=before)
            if kept.failed is not None:
                return learner, kept
            return learner, replace(kept, failed=row.update, differences=tuple(differences))
        rounding += [f"update {row.update}: {text}" for text in differences]
    return learner, Rolled(updates=tuple(rows), differences=tuple(rounding))


def _again(
    learner: Learner, reader: RunReader, row: UpdateRow, before: int, wanted: str | None
) -> tuple[list[str], bool]:
    """Learn ``row`` again; return what differs, and whether it is the recorded update nevertheless."""
    use_threads(row.num_threads)
    try:
        batch = rebuild_batch(reader, row.update)
        result = relearn(
            learner, batch, policy_version=row.policy_version, before=before, state=row.learner_state
        )
    except LearnerError as error:
        return [str(error)], False
    found = compare(row, result)
    differences = list(found.differences)
    made = checksum(learner.weights())
    if wanted is not None and made != wanted:
        differences.append(f"the weights' checksum is {made}, recorded {wanted}")
    return differences, found.same_batch and found.close
