"""Who is taken for dead: random histories of parts that work, rest, stop, and of clocks that jump."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.config import SupervisionSection
from hotpot.rollout.actors import ActorState
from hotpot.topology.supervision.beats import (
    Beat,
    PartKind,
    actor_beats,
    engine_beat,
    learner_beat,
    queue_beat,
    store_beat,
)
from hotpot.topology.supervision.counted_time import CountedTime
from hotpot.topology.supervision.supervisor import Replace, Stop, Supervisor, Verdicts, Warn

BEAT_S, DEAD_S = 1.0, 8.0
SETTINGS = SupervisionSection(beat_s=BEAT_S, dead_after_s=DEAD_S, max_replacements=2)


def beat(part: str = "a", progress: float = 0, work: int = 1, kind: PartKind = PartKind.ACTOR) -> Beat:
    return Beat(part=part, kind=kind, progress=progress, work=work)


def found(verdicts: Verdicts, kind: str) -> list[dict[str, object]]:
    return [detail for name, detail in verdicts.events if name == kind]


@dataclass
class Script:
    """One part's life: ``pauses`` between pieces of work, each with whether it has work meanwhile; then it stops."""

    pauses: list[tuple[float, bool]]

    def at(self, now_s: float) -> tuple[int, bool, bool]:
        """Progress, work, and whether the script is over."""
        time_s = 0.0
        for index, (pause_s, work) in enumerate(self.pauses):
            time_s += pause_s
            if now_s < time_s:
                return index, work, False
        return len(self.pauses), True, True

    @property
    def stops_s(self) -> float:
        return sum(pause for pause, _ in self.pauses)


# With work a pause is within the bound; at rest it may be of any length.
_pauses = st.one_of(
    st.tuples(st.floats(0.01, DEAD_S * 0.99), st.just(True)), st.tuples(st.floats(0.01, 60.0), st.just(False))
)
_scripts = st.lists(st.builds(Script, st.lists(_pauses, max_size=8)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    scripts=_scripts,
    kinds=st.lists(
        st.sampled_from([PartKind.ACTOR, PartKind.ENGINE, PartKind.LEARNER]), min_size=4, max_size=4
    ),
    steps=st.lists(st.floats(0.05, BEAT_S / 2), min_size=1, max_size=20),
    origin=st.floats(0, 1e6),
)
def test_the_living_are_never_taken_for_dead_and_the_dead_are_in_time(
    scripts: list[Script], kinds: list[PartKind], steps: list[float], origin: float
) -> None:
    supervisor = Supervisor(SETTINGS.model_copy(update={"max_replacements": 1000}))
    died: dict[str, float] = {}
    now_s, turn = 0.0, 0
    end_s = max(script.stops_s for script in scripts) + DEAD_S + BEAT_S
    while now_s <= end_s:
        beats = []
        for index, script in enumerate(scripts):
            progress, work, _ = script.at(now_s)
            beats.append(beat(f"p{index}", progress, int(work), kinds[index]))
        for decision in supervisor.turn(origin + now_s, beats).decisions:
            part = decision.actor_id if isinstance(decision, Replace) else getattr(decision, "culprit", "")
            assert isinstance(decision, Stop) != (kinds[int(part[1:])] is PartKind.ACTOR)
            died.setdefault(part, now_s)
        now_s, turn = now_s + steps[turn % len(steps)], turn + 1
    for index, script in enumerate(scripts):
        at_s = died[f"p{index}"]
        assert script.at(at_s)[2], f"{script} was taken for dead at {at_s}, when it was not"
        assert at_s <= script.stops_s + DEAD_S + BEAT_S + 1e-6


@settings(deadline=None, max_examples=60)
@given(
    jumps=st.lists(
        st.one_of(st.floats(DEAD_S, 1e6), st.floats(-1e6, -0.001), st.floats(0.0, 0.1)),
        min_size=1,
        max_size=30,
    )
)
def test_a_clock_that_jumps_kills_nobody_who_then_goes_on(jumps: list[float]) -> None:
    supervisor, now_s, progress = Supervisor(SETTINGS), 0.0, 0
    for jump_s in jumps:
        now_s += jump_s
        # Silent over the jump, and it goes on in the turn after.
        for step_s in (0.0, 0.25):
            now_s += step_s
            progress += step_s > 0
            everybody = [beat(kind.value, progress, 1, kind) for kind in PartKind]
            assert supervisor.turn(now_s, everybody).decisions == ()


def test_a_pause_of_its_own_is_told_and_counts_as_a_quarter_of_the_bound() -> None:
    supervisor = Supervisor(SETTINGS)
    supervisor.turn(0.0, [beat()])
    slept = supervisor.turn(10 * DEAD_S, [beat()])
    assert slept.decisions == ()
    assert found(slept, "supervision_gap") == [{"seconds": 9.75 * DEAD_S}]
    assert supervisor.turn(10 * DEAD_S + 0.74 * DEAD_S / 3, [beat()]).decisions == ()
    decisions = [
        decision
        for turn in range(1, 8)
        for decision in supervisor.turn(10 * DEAD_S + turn * DEAD_S / 4, [beat()]).decisions
    ]
    assert len(decisions) == 2
    assert all(isinstance(decision, Replace) for decision in decisions)


def test_actors_are_replaced_as_often_as_the_settings_say_then_the_run_ends() -> None:
    supervisor, decisions = Supervisor(SETTINGS), []
    for turn in range(200):
        decisions += supervisor.turn(turn * 0.5, [beat("actor-1")]).decisions
    assert [type(decision) for decision in decisions] == [Replace, Replace, Stop]
    stop = decisions[-1]
    assert isinstance(stop, Stop)
    assert stop.culprit == "actor-1"
    assert "supervision.max_replacements = 2" in stop.reason
    assert (supervisor.replacements, supervisor.dead_parts) == (2, 3)
    kind, detail = supervisor.replaced("actor-1", "actor-2", "hung")
    assert (kind, detail["fresh_id"], detail["replacements"]) == ("actor_replaced", "actor-2", 2)


@pytest.mark.parametrize("kind", PartKind)
def test_what_becomes_of_each_kind_of_part(kind: PartKind) -> None:
    supervisor, decisions = Supervisor(SETTINGS), []
    for turn in range(40):
        verdicts = supervisor.turn(turn * 0.5, [beat("it", kind=kind), beat("idle", 0, 0, kind)])
        decisions += verdicts.decisions
        assert len(found(verdicts, "part_dead") + found(verdicts, "part_silent")) == len(verdicts.decisions)
    expected = {PartKind.ACTOR: Replace, PartKind.ENGINE: Stop, PartKind.LEARNER: Stop}.get(kind, Warn)
    assert [type(decision) for decision in decisions] == [expected] * (2 if kind is PartKind.ACTOR else 1)
    assert supervisor.silent().startswith("it, silent for")


def test_a_store_that_stands_still_again_is_told_again() -> None:
    supervisor, told = Supervisor(SETTINGS), 0
    for turn in range(120):
        told += len(supervisor.turn(turn * 0.5, [beat("lake", turn // 60, 3, PartKind.STORE)]).decisions)
    assert told == 2


def test_beats_go_on_the_record_once_a_beat_with_every_part() -> None:
    supervisor, rows = Supervisor(SETTINGS), []
    for turn in range(101):
        assert supervisor.due(turn * 0.5)
        rows += found(supervisor.turn(turn * 0.5, [beat("x", turn), beat("y", 0, 0)]), "beats")
        assert not supervisor.due(turn * 0.5 + 0.1)
    assert len(rows) == 51
    assert rows[-1] == {
        "elapsed_s": 50.0,
        "moves": 100,
        "replacements": 0,
        "dead_parts": 0,
        "parts": [
            {"part": "x", "kind": "actor", "progress": 100, "work": 1, "silent_s": 0.0},
            {"part": "y", "kind": "actor", "progress": 0, "work": 0, "silent_s": 0.0},
        ],
    }
    # Set back by an hour: both go on at once.
    assert supervisor.due(-3600.0)
    assert found(supervisor.turn(-3600.0, [beat()]), "beats")


def test_an_actor_has_as_long_as_its_calls_may_take() -> None:
    patient = actor_beats(
        [ActorState(actor_id="a", actor_group="g", progress=3, calls=2, since_s=1.0)], call_timeout_s=20.0
    )
    supervisor = Supervisor(SETTINGS)
    assert not any(supervisor.turn(turn * 0.5, patient).decisions for turn in range(42))
    assert any(supervisor.turn(turn * 0.5, patient).decisions for turn in range(42, 45))


def test_an_actor_that_says_it_is_broken_is_replaced_at_once() -> None:
    state = ActorState(
        actor_id="a", actor_group="g", progress=3, calls=0, since_s=None, broken="a has 5 calls that hang"
    )
    (decision,) = Supervisor(SETTINGS).turn(0.0, actor_beats([state], call_timeout_s=20.0)).decisions
    assert decision == Replace(actor_id="a", reason="a has 5 calls that hang")


def test_each_part_has_a_beat() -> None:
    assert engine_beat("e", progress=9, requests=2) == beat("e", 9, 2, PartKind.ENGINE)
    assert learner_beat("l", busy=True, beat=(4, 1.5)) == beat("l", 4, 1, PartKind.LEARNER)
    assert learner_beat("l", busy=False, beat=(4, 1.5)).work == 0
    assert store_beat("s", archived=-3, backlog=3) == beat("s", -3, 3, PartKind.STORE)
    assert queue_beat("q", moved=7, waiting=0) == beat("q", 7, 0, PartKind.QUEUE)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1e9), max_size=50), st.floats(0.001, 100))
def test_counted_time_never_goes_back_and_never_leaps(readings: list[float], longest_s: float) -> None:
    clock, before_s = CountedTime(longest_s), 0.0
    for now_s in readings:
        at_s = clock.at(now_s)
        assert before_s <= at_s <= before_s + longest_s * (1 + 1e-9) + 1e-9
        before_s = at_s
