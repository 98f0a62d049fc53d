"""Admission, rows and preemption, without a model and without memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.engine.embedded.scheduler import Scheduler


def make(rows: int = 4, share: float = 0.01, waiting: str = "") -> Scheduler:
    scheduler = Scheduler(num_rows=rows, admit_share=share)
    for name in waiting:
        scheduler.submit(name)
    return scheduler


def start_all(scheduler: Scheduler) -> dict[str, int]:
    started = {}
    while scheduler.head is not None:
        row = scheduler.next_row()
        name, given_row = scheduler.start()
        assert row == given_row
        started[name] = row
    return started


def test_the_queue_is_served_in_order_lowest_row_first() -> None:
    scheduler = make(3, waiting="abcd")
    assert scheduler.ready()
    assert start_all(scheduler) == {"a": 0, "b": 1, "c": 2}
    assert (scheduler.head, scheduler.ready(), scheduler.num_running) == (None, False, 3)
    assert scheduler.finish("b") == 1
    assert scheduler.head == "d"
    assert start_all(scheduler) == {"d": 1}


@pytest.mark.parametrize(("share", "needed"), [(0.01, 1), (0.2, 3), (0.5, 10)])
def test_admission_waits_for_its_share(share: float, needed: int) -> None:
    scheduler = make(100, share, "abcdefghij")
    start_all(scheduler)
    for number in range(1, needed + 1):
        scheduler.submit(f"late {number}")
        assert scheduler.ready() == (number == needed)


def test_the_share_counts_only_as_many_as_there_are_rows() -> None:
    scheduler = make(4, 0.5, "abcdefgh")
    start_all(scheduler)
    scheduler.finish("a")
    assert not scheduler.ready()
    scheduler.finish("b")
    assert scheduler.ready()


def test_followers_wait_for_their_leader_and_come_first_then_in_their_order() -> None:
    scheduler = make(2, 0.9, "abcd")
    assert scheduler.start() == ("a", 0)
    scheduler.follow("a")
    scheduler.follow("a")
    assert scheduler.start() == ("d", 1)
    scheduler.submit("e")
    scheduler.finish("d")
    scheduler.release("a")
    assert scheduler.ready()
    assert start_all(scheduler) == {"b": 1}
    scheduler.finish("b")
    assert scheduler.head == "c"


def test_who_waited_for_a_request_that_left_waits_no_more() -> None:
    for leave in (Scheduler.finish, Scheduler.preempt):
        scheduler = make(3, 0.9, "ab")
        scheduler.start()
        scheduler.follow("a")
        leave(scheduler, "a")
        assert start_all(scheduler) == ({"b": 0} if leave is Scheduler.finish else {"a": 0, "b": 1})


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    scheduler = make(3, 1.0, "abcd")
    start_all(scheduler)
    assert scheduler.newest() == "c"
    assert scheduler.preempt("c") == 2
    assert (scheduler.newest(), scheduler.head, scheduler.ready()) == ("b", "c", True)
    assert scheduler.preempt("b") == 1
    assert start_all(scheduler) == {"b": 1, "c": 2}
    assert scheduler.newest() == "c"


@given(
    rows=st.integers(1, 4),
    share=st.floats(0.01, 1.0),
    events=st.lists(st.sampled_from(["submit", "admit", "finish", "preempt", "follow"]), max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_whatever_comes_everybody_is_served_once_and_rows_are_never_shared(
    rows: int, share: float, events: list[str]
) -> None:
    scheduler = make(rows, share)
    running: dict[str, int] = {}
    submitted: list[str] = []
    done: list[str] = []

    def admit(*, follow: bool) -> None:
        if not scheduler.ready():
            return
        while (head := scheduler.head) is not None:
            if follow and running:
                scheduler.follow(min(running))
                follow = False
                continue
            name, row = scheduler.start()
            assert name == head
            assert row not in running.values()
            assert 0 <= row < rows
            running[name] = row

    for event in events:
        if event == "submit":
            submitted.append(f"{len(submitted):03}")
            scheduler.submit(submitted[-1])
        elif event in ("admit", "follow"):
            admit(follow=event == "follow")
        elif running and event == "finish":
            name = min(running)
            assert scheduler.finish(name) == running.pop(name)
            done.append(name)
        elif running:
            name = scheduler.newest()
            assert scheduler.preempt(name) == running.pop(name)
    for _ in range(2 * len(submitted) + 1):
        admit(follow=False)
        for name in list(running):
            scheduler.finish(name)
            done.append(name)
            del running[name]
    assert sorted(done) == submitted
