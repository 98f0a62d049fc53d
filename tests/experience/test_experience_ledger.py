import itertools
import sqlite3

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotpot.errors import LedgerError, StoreError
from hotpot.experience import MARKS, Lease, Ledger
from hotpot.experience.log.ledger_file import read_not_logged
from hotpot.experience.log.wal import Position
from hotpot.testing.records import make_row
from hotpot.types import ConsumptionRow, DiscardRow


def lease(attempt_id):
    return Lease(
        attempt_id=attempt_id, episode_id=attempt_id[:-2], group_id="g0", task_id="t", purpose="training"
    )


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "control.sqlite", "run")
    yield ledger
    ledger.close()


def finish(ledger, *ids, offset=100):
    ledger.apply(Position(segment=1, offset=offset), ledger.ended(dict.fromkeys(ids, ""), "finished"))


def test_an_attempt_ends_once(ledger):
    ledger.lease([lease("0.0.0"), lease("0.1.0"), lease("0.2.0")])
    finish(ledger, "0.0.0")
    ledger.fail("0.1.0", "tool server down")
    ledger.drop("0.2.0", "cut_off")
    for attempt_id in ("0.0.0", "0.1.0", "0.2.0", "9.9.9"):
        with pytest.raises(LedgerError, match=attempt_id):
            ledger.fail(attempt_id, "x")
        with pytest.raises(LedgerError, match=attempt_id):
            ledger.drop(attempt_id, "x")
        with pytest.raises(LedgerError, match=attempt_id):
            ledger.ended({attempt_id: ""}, "finished")
    counts = ledger.counts()
    assert (counts.leased, counts.finished, counts.failed, counts.dropped, counts.total) == (0, 1, 1, 1, 3)


def test_leasing_twice_is_refused_and_leases_nothing_of_the_call(ledger):
    ledger.lease([lease("0.0.0")])
    with pytest.raises(LedgerError, match=r"0\.0\.0"):
        ledger.lease([lease("0.1.0"), lease("0.0.0")])
    assert ledger.counts().total == 1


@pytest.mark.parametrize("name", MARKS)
def test_marks_never_go_back(ledger, name):
    assert ledger.mark(name) == -1
    ledger.advance(name, 0)
    ledger.advance(name, 5)
    for value in (5, 4, -1):
        with pytest.raises(LedgerError, match="never reused"):
            ledger.advance(name, value)
    assert ledger.mark(name) == 5
    with pytest.raises(LedgerError, match="unknown mark"):
        ledger.advance("wal_segment", 3)


def test_everything_survives_reopening(tmp_path):
    path = tmp_path / "control.sqlite"
    first = Ledger(path, "run")
    first.lease([lease("0.0.0"), lease("0.1.0")])
    first.advance("policy_version", 3)
    finish(first, "0.0.0")
    first.fail("0.1.0", "broke")
    first.close()
    second = Ledger(path, "run")
    assert second.token == first.token + 1
    assert not second.previous_owner_died()
    assert second.mark("policy_version") == 3
    assert second.applied() == Position(segment=1, offset=100)
    assert second.counts().finished == 1
    (waiting,) = second.not_logged()
    assert (waiting.attempt_id, waiting.state, waiting.reason) == ("0.1.0", "failed", "broke")
    second.close(ended=False)
    third = Ledger(path, "run")
    assert third.previous_owner_died()
    third.close()


def test_a_superseded_owner_changes_nothing_any_more(tmp_path):
    path = tmp_path / "control.sqlite"
    old = Ledger(path, "run")
    old.lease([lease("0.0.0")])
    new = Ledger(path, "run")
    for write in (
        lambda: old.lease([lease("0.1.0")]),
        lambda: old.fail("0.0.0", "x"),
        lambda: old.advance("update", 1),
        lambda: finish(old, "0.0.0"),
        old.sync,
    ):
        with pytest.raises(LedgerError, match="superseded"):
            write()
    assert new.counts().leased == new.counts().total == 1
    old.close(ended=False)
    assert new.drop_leased("owner_died") == 1
    new.close()


def test_a_frame_applied_twice_changes_nothing(ledger):
    ledger.lease([lease("0.0.0")])
    rows = ledger.ended({"0.0.0": ""}, "finished")
    used = [make_row(ConsumptionRow, trajectory_id="0.0.0", update=1)]
    for _ in range(2):
        ledger.apply(Position(segment=1, offset=9), rows, used, 1)
    assert ledger.counts().finished == 1
    with pytest.raises(LedgerError, match="update 1 was recorded before"):
        ledger.check_consumptions([], 1)


def test_consumptions_are_checked(ledger):
    ledger.lease([lease("0.0.0"), lease("0.1.0"), lease("0.2.0")])
    finish(ledger, "0.0.0")
    ledger.drop("0.1.0", "x")

    def use(*ids, update=1):
        return [make_row(ConsumptionRow, trajectory_id=i, update=update) for i in ids]

    ledger.check_consumptions(use("0.0.0", "0.0.0/1"), 1)
    for rows, words in (
        (use("0.1.0"), "dropped"),
        (use("0.2.0/3"), "leased"),
        (use("0.0.0", "77.0.0"), "77.0.0.*never leased"),
        (use("0.0.0", "0.0.0"), "once"),
        (use("0.0.0", update=2), "own number"),
    ):
        with pytest.raises(LedgerError, match=words):
            ledger.check_consumptions(rows, 1)


def test_what_is_discarded_is_so_once_and_only_replay_uses_it_from_then_on(tmp_path):
    ledger = Ledger(tmp_path / "control.sqlite", "run")
    ledger.lease([lease("0.0.0"), lease("0.1.0"), lease("0.2.0")])
    finish(ledger, "0.0.0", "0.1.0")

    def gone(*ids, reason="stale"):
        return [make_row(DiscardRow, trajectory_id=i, reason=reason, staleness=9) for i in ids]

    def use(source, update=2):
        return [make_row(ConsumptionRow, trajectory_id="0.0.0", source=source, update=update)]

    ledger.check_discards(gone("0.0.0", "0.0.0/1"))
    consumed = [make_row(ConsumptionRow, trajectory_id="0.1.0", source="fresh", update=1)]
    for _ in range(2):  # a frame may be applied again
        ledger.apply(Position(segment=1, offset=200), [], consumed, 1, gone("0.0.0"))
    ledger.close()
    ledger = Ledger(tmp_path / "control.sqlite", "run")
    for rows, words in (
        (gone("0.2.0"), "0.2.0 can't be discarded.*leased"),
        (gone("7.0.0"), "never leased"),
        (gone("0.0.0/1", "0.0.0/1"), "once"),
        (gone("0.0.0", reason="surplus"), r"as surplus.*discarded before \(stale\)"),
        (gone("0.1.0"), "update 1 consumed it"),
    ):
        with pytest.raises(LedgerError, match=words):
            ledger.check_discards(rows)
    with pytest.raises(LedgerError, match=r"as fresh: it was discarded \(stale\).*hot, cold"):
        ledger.check_consumptions(use("fresh"), 2)
    ledger.check_consumptions(use("hot"), 2)
    ledger.close()


def test_a_broken_file_is_a_store_error(tmp_path):
    path = tmp_path / "control.sqlite"
    path.write_bytes(b"this is no database, but long enough to look at" * 50)
    with pytest.raises(StoreError, match="ledger"):
        Ledger(path, "run")


def test_others_may_read_what_is_not_logged(tmp_path):
    path = tmp_path / "control.sqlite"
    assert read_not_logged(path, "run") == []
    ledger = Ledger(path, "run")
    ledger.lease([lease("0.0.0"), lease("0.1.0"), lease("0.2.0")])
    finish(ledger, "0.0.0")
    ledger.fail("0.2.0", "x")
    assert [(r.attempt_id, r.state) for r in read_not_logged(path, "run")] == [
        ("0.1.0", "leased"),
        ("0.2.0", "failed"),
    ]
    ledger.close()


def test_a_ledger_that_cannot_be_read_is_not_an_empty_one(tmp_path):
    path = tmp_path / "control.sqlite"
    path.write_bytes(b"")
    assert read_not_logged(path, "run") == []  # its owner is just making it
    path.write_bytes(b"this is no database, but long enough to look at" * 50)
    with pytest.raises(StoreError, match=r"control\.sqlite"):
        read_not_logged(path, "run")
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=r"control\.sqlite"):
        read_not_logged(path, "run")


def test_a_locked_ledger_is_not_read_without_what_is_still_in_its_own_log(tmp_path, monkeypatch):
    path = tmp_path / "control.sqlite"
    ledger = Ledger(path, "run")
    ledger.lease([lease("0.0.0")])
    real = sqlite3.connect

    def read_only_folder(name, **keywords):
        return real(f"file:{tmp_path}/none?mode=ro" if "mode=ro" in str(name) else name, **keywords)

    monkeypatch.setattr(sqlite3, "connect", read_only_folder)
    with pytest.raises(StoreError, match="can be written"):
        read_not_logged(path, "run")
    monkeypatch.undo()
    ledger.close()
    monkeypatch.setattr(sqlite3, "connect", read_only_folder)
    assert [row.attempt_id for row in read_not_logged(path, "run")] == ["0.0.0"]


def test_reasons_are_redacted_before_they_are_kept(tmp_path):
    ledger = Ledger(tmp_path / "control.sqlite", "run", redact=lambda text: text.replace("hunter2", "***"))
    ledger.lease([lease("0.0.0"), lease("0.1.0"), lease("0.2.0")])
    ledger.fail("0.0.0", "login hunter2 refused")
    ledger.drop("0.1.0", "hunter2")
    assert [row.reason for row in ledger.ended({"0.2.0": "hunter2!"}, "failed")] == ["***!"]
    assert [row.reason for row in ledger.not_logged()] == ["login *** refused", "***"]
    ledger.close()


class Attempts(RuleBasedStateMachine):
    """Any order of calls: the ledger agrees with a dictionary, and each attempt ends at most once."""

    numbers = itertools.count()

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(":memory:", "run")  # type: ignore[arg-type]
        self.expected = {}
        self.offset = 0

    @rule(i=st.integers(0, 5))
    def lease(self, i):
        if f"{i}.0.0" in self.expected:
            with pytest.raises(LedgerError):
                self.ledger.lease([lease(f"{i}.0.0")])
        else:
            self.ledger.lease([lease(f"{i}.0.0")])
            self.expected[f"{i}.0.0"] = "leased"

    @rule(i=st.integers(0, 5), state=st.sampled_from(["failed", "dropped", "finished"]))
    def end(self, i, state):
        attempt_id = f"{i}.0.0"
        self.offset += 1

        def act():
            if state == "finished":
                finish(self.ledger, attempt_id, offset=self.offset)
            else:
                getattr(self.ledger, state.removesuffix("ped").removesuffix("ed"))(attempt_id, "why")

        if self.expected.get(attempt_id) == "leased":
            act()
            self.expected[attempt_id] = state
        else:
            with pytest.raises(LedgerError):
                act()

    @invariant()
    def balance(self):
        counts = self.ledger.counts()
        for state in ("leased", "finished", "failed", "dropped"):
            assert getattr(counts, state) == list(self.expected.values()).count(state)
        assert counts.total == len(self.expected)

    def teardown(self):
        self.ledger.close()


Attempts.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestAttempts = Attempts.TestCase
