"""Admission, slots and eviction, without a model."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.engine.embedded.scheduler import Scheduler


def admit_ids(scheduler: Scheduler) -> list[str]:
    return [admission.request_id for admission in scheduler.admit()]


def test_nothing_running_admits_whatever_waits() -> None:
    scheduler = Scheduler(num_slots=4, admit_share=1.0)
    assert scheduler.admit() == []
    scheduler.submit("a", "a")
    assert admit_ids(scheduler) == ["a"]
    assert scheduler.admit() == []


@pytest.mark.parametrize(("share", "needed"), [(0.25, 2), (0.5, 4), (1.0, None)])
def test_admission_waits_for_its_share(share: float, needed: int | None) -> None:
    scheduler = Scheduler(num_slots=100, admit_share=share)
    for number in range(4):
        scheduler.submit(f"r{number}", f"s{number}")
    assert len(admit_ids(scheduler)) == 4
    admitted_at = None
    for number in range(4, 12):
        scheduler.submit(f"r{number}", f"s{number}")
        if scheduler.admit():
            admitted_at = number - 3
            break
    assert admitted_at == needed


def test_the_share_counts_only_as_many_as_there_are_slots() -> None:
    scheduler = Scheduler(num_slots=4, admit_share=0.5)
    for number in range(40):
        scheduler.submit(f"r{number}", f"s{number}")
    assert admit_ids(scheduler) == ["r0", "r1", "r2", "r3"]
    scheduler.finish("r2")
    assert scheduler.admit() == []
    scheduler.finish("r0")
    assert admit_ids(scheduler) == ["r4", "r5"]


def test_a_session_comes_back_to_its_slot() -> None:
    scheduler = Scheduler(num_slots=3, admit_share=0.5)
    for name in "abc":
        scheduler.submit(f"{name}0", name)
    first = {a.request_id[0]: a.slot for a in scheduler.admit()}
    assert sorted(first.values()) == [0, 1, 2]
    for name in "abc":
        scheduler.finish(f"{name}0")
    # A new session first in the queue does not take the slot of one that is admitted with it.
    for name in "dab":
        scheduler.submit(f"{name}1", name)
    second = {a.request_id[0]: a for a in scheduler.admit()}
    assert {n: (a.slot, a.returning) for n, a in second.items()} == {
        "a": (first["a"], True),
        "b": (first["b"], True),
        "d": (first["c"], False),
    }


def test_the_least_recently_used_idle_slot_goes_first() -> None:
    scheduler = Scheduler(num_slots=3, admit_share=1.0)
    for name in "abc":
        scheduler.submit(name, name)
    slots = {a.request_id: a.slot for a in scheduler.admit()}
    for name in "bca":
        scheduler.finish(name)
    scheduler.submit("x", "x")
    scheduler.submit("y", "y")
    assert [a.slot for a in scheduler.admit()] == [slots["b"], slots["c"]]


def test_who_came_first_may_take_the_slot_of_a_session_that_waits() -> None:
    scheduler = Scheduler(num_slots=2, admit_share=0.01)
    for name in "ab":
        scheduler.submit(f"{name}0", name)
    slots = {a.request_id: a.slot for a in scheduler.admit()}
    scheduler.finish("a0")
    scheduler.submit("c0", "c")
    scheduler.submit("a1", "a")
    # Only one slot can be had; it is a's, and c came first.
    assert [(a.request_id, a.slot) for a in scheduler.admit()] == [("c0", slots["a0"])]
    scheduler.finish("b0")
    assert [(a.request_id, a.slot, a.returning) for a in scheduler.admit()] == [("a1", slots["b0"], False)]


def test_two_requests_of_one_session_never_share_a_slot() -> None:
    scheduler = Scheduler(num_slots=3, admit_share=0.01)
    scheduler.submit("r0", "s")
    scheduler.submit("r1", "s")
    first = scheduler.admit()
    assert len({a.slot for a in first}) == 2
    scheduler.finish("r0")
    scheduler.finish("r1")
    scheduler.submit("r2", "s")
    (again,) = scheduler.admit()
    assert (again.slot, again.returning) == (first[1].slot, True)
    for name in ("x", "y"):
        scheduler.submit(name, name)
    assert {a.slot for a in scheduler.admit()} == {0, 1, 2} - {again.slot}


@settings(max_examples=100, deadline=None)
@given(
    slots=st.integers(1, 5),
    share=st.floats(0.01, 1.0),
    requests=st.lists(st.integers(0, 7), min_size=1, max_size=60),
    seed=st.integers(0, 2**32 - 1),
)
def test_whatever_comes_is_served_in_order_and_slots_are_never_shared(
    slots: int, share: float, requests: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    scheduler = Scheduler(num_slots=slots, admit_share=share)
    pending = [(f"r{index}", f"s{session}") for index, session in enumerate(requests)]
    held: dict[str, int] = {}
    last_owner: dict[int, str] = {}
    sessions = dict(pending)
    admitted = []
    while len(admitted) < len(requests) or held:
        for _ in range(chance.randint(0, 3)):
            if pending:
                scheduler.submit(*pending.pop(0))
        for admission in scheduler.admit():
            assert admission.slot not in held.values()
            assert 0 <= admission.slot < slots
            session = sessions[admission.request_id]
            assert not admission.returning or last_owner[admission.slot] == session
            held[admission.request_id] = admission.slot
            last_owner[admission.slot] = session
            admitted.append(admission.request_id)
        if held and (chance.random() < 0.5 or not pending):
            done = chance.choice(sorted(held))
            scheduler.finish(done)
            del held[done]
    assert admitted == [f"r{index}" for index in range(len(requests))]


def test_what_ran_before_does_not_decide_who_gets_which_slot() -> None:
    fresh, used = (Scheduler(num_slots=3, admit_share=0.01) for _ in range(2))
    for number in range(7):
        used.submit(f"old{number}", f"old{number}")
        for admission in used.admit():
            if admission.request_id != "old6":
                used.finish(admission.request_id)
    used.finish("old6")

    def play(scheduler: Scheduler) -> list[tuple[str, int, bool]]:
        seen = []
        for name, session in (("a", "a"), ("b", "b"), ("c", "c")):
            scheduler.begin(session)
            scheduler.submit(name, session)
        for _ in range(2):
            admitted = scheduler.admit()
            seen += [(one.request_id, one.slot, one.returning) for one in admitted]
            for one in admitted:
                scheduler.finish(one.request_id)
            for name, session in (("b2", "b"), ("d", "d")):
                scheduler.begin(session)
                scheduler.submit(name, session)
        return seen

    assert play(used) == play(fresh)
    assert ("b2", 1, True) in play(Scheduler(num_slots=3, admit_share=0.01))
