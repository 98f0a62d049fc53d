"""How far a roll forward goes where an update does not come out as recorded: the learner is what it says it learned."""

import pytest

from hotpot.testing.records import make_row
from hotpot.topology.resume import roll_forward as module
from hotpot.types import UpdateRow


@pytest.mark.parametrize(
    ("outcomes", "learned", "failed"),
    [
        ([(1, True), (2, True), (3, True)], [1, 2, 3], None),
        ([(1, True), (2, True), (3, False), (1, True), (2, True)], [1, 2], 3),
        ([(1, False)], [], 1),
        # The second time, an update before the failed one does not come out as recorded any more.
        ([(1, True), (2, True), (3, False), (1, True), (2, False), (1, True)], [1], 2),
        ([(1, True), (2, False), (1, False)], [], 1),
    ],
)
def test_the_learner_has_learned_what_is_said_and_no_more(monkeypatch, outcomes, learned, failed):
    left = list(outcomes)

    def again(learner, reader, row, before, wanted):
        number, good = left.pop(0)
        assert (row.update, before) == (number, 10 + number - 1)
        learner.append(number)
        return [] if good else [f"update {number} differs"], good

    monkeypatch.setattr(module, "_again", again)
    monkeypatch.setattr(module, "policy_checksums", lambda reader: {})
    rows = [make_row(UpdateRow, update=number, parent_update=number - 1) for number in (1, 2, 3)]
    learner, rolled = module.roll_forward(list, None, rows, before=10)
    assert not left
    assert learner == learned == [row.update for row in rolled.updates]
    assert rolled.failed == failed
    assert rolled.differences == (() if failed is None else (f"update {failed} differs",))
