"""What becomes of a full context, by lengths alone, against the plain rule: every window tried, the largest that fits."""

from hypothesis import given
from hypothesis import strategies as st

from hotpot.rollout.overflow import Decision, Lengths, Room, Verdict, Window, choose, decide, hand_over

MARKER = 3


def plain(opening: int, exchanges: tuple[int, ...], *, bridge: int = MARKER):
    """Lengths that add up, as most templates' do."""
    return lambda window: opening + bridge * window.bridged + sum(exchanges[window.left_out :])


@st.composite
def cases(draw: st.DrawFn):
    exchanges = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=6)))
    opening = draw(st.integers(1, 40))
    room = Room(
        context=draw(st.integers(2, 120)),
        step=draw(st.integers(1, 30)),
        request=draw(st.integers(0, 9)),
        note=draw(st.integers(0, 20)),
    )
    return room, Lengths(opening=opening, exchanges=exchanges), draw(st.booleans())


@given(case=cases(), policy=st.sampled_from(["end", "truncate", "segment"]), asked=st.integers(1, 120))
def test_every_decision_leaves_room_and_leaves_out_least(case, policy, asked) -> None:
    room, lengths, noted = case
    bridge = MARKER if noted else 0
    whole = lengths.opening + bridge + sum(lengths.exchanges)
    measure = plain(lengths.opening, lengths.exchanges)
    decision = decide(policy, room, lengths, whole=whole, asked=asked, measure=measure, noted=noted)
    newest = len(lengths.exchanges) - 1
    fitting = [
        w
        for k in range(1, newest + 1)
        for w in (Window(left_out=k, bridged=True),)
        if measure(w) + room.step + room.request + room.note <= room.context
    ]
    if policy == "end":
        assert decision.verdict is (Verdict.KEEP if whole < room.context else Verdict.END)
        return
    if whole + room.step + room.request + room.note <= room.context:
        assert decision == Decision(verdict=Verdict.KEEP)
        return
    if fitting:
        assert decision.window == fitting[0]
    if decision.window is None:
        assert decision.verdict is (Verdict.KEEP if whole < room.context else Verdict.END)
        assert (
            newest == 0
            or whole < room.context
            or measure(Window(left_out=newest, bridged=False)) >= room.context
        )
    else:
        assert measure(decision.window) < min(whole, room.context)
        assert decision.window.left_out <= newest
    if decision.verdict is Verdict.ASK:
        assert policy == "segment"
        assert newest > 0
        assert asked + room.note <= room.context
    if decision.verdict is Verdict.SHORTEN and policy == "segment":
        assert newest == 0 or room.note == 0 or asked + room.note > room.context


def test_the_newest_exchange_stays_and_a_bridge_goes_last() -> None:
    room = Room(context=50, step=10)
    lengths = Lengths(opening=20, exchanges=(10, 10, 26))
    measure = plain(20, (10, 10, 26))
    assert choose(room, lengths, whole=66, measure=measure, noted=False) == Window(left_out=2, bridged=True)
    tight = Lengths(opening=20, exchanges=(10, 10, 28))
    measure = plain(20, tight.exchanges)
    assert choose(room, tight, whole=68, measure=measure, noted=False) == Window(left_out=2, bridged=False)
    huge = Lengths(opening=20, exchanges=(10, 30))
    assert choose(room, huge, whole=60, measure=plain(20, (10, 30)), noted=False) is None
    only = Lengths(opening=20, exchanges=(28,))
    measure = plain(20, (28,))
    assert choose(room, only, whole=51, measure=measure, noted=True) == Window(left_out=0, bridged=False)


def test_a_prompt_with_room_but_no_reserve_is_kept_where_nothing_shortens_it() -> None:
    room, lengths = Room(context=50, step=10), Lengths(opening=20, exchanges=(25,))
    measure = plain(20, (25,))
    for policy in ("truncate", "segment"):
        decision = decide(policy, room, lengths, whole=45, asked=0, measure=measure, noted=False)
        assert decision == Decision(verdict=Verdict.KEEP)


def test_a_note_that_gains_nothing_is_not_handed_over() -> None:
    room, lengths = Room(context=50, step=5, request=5, note=20), Lengths(opening=10, exchanges=(9, 9))
    assert hand_over(room, lengths, plain(10, (9, 9), bridge=9), whole=28) is None
    assert hand_over(room, lengths, plain(10, (9, 9), bridge=31), whole=80) is None
    assert hand_over(room, lengths, plain(10, (9, 9), bridge=8), whole=28) == Window(left_out=1, bridged=True)
