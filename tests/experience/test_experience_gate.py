import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.experience import RULES, Limits, check, from_table, to_table
from hotpot.experience.gate.admission import judge
from hotpot.experience.gate.forks import FoundParents, parent_steps
from hotpot.experience.gate.gate import Refusal, payload_json, quarantine_row
from hotpot.experience.gate.known import KnownVersions
from hotpot.experience.gate.rules import OTHER_REASONS
from hotpot.ids import prefix_hash
from hotpot.testing.records import ENV_VERSION, make_fork, make_group, make_trajectory
from hotpot.types import Purpose, Split, StepRow, Trajectory, TrajectoryRow

LIMITS = Limits(
    run_id="run", vocabulary_size=64, versions=KnownVersions.of([("env", ENV_VERSION), ("schema", "2")])
)


def with_row(**changes):
    trajectory = make_trajectory(num_steps=3)
    return dataclasses.replace(trajectory, row=dataclasses.replace(trajectory.row, **changes))


def with_step(number=0, base=None, **changes):
    trajectory = base or make_trajectory(num_steps=3)
    steps = list(trajectory.steps)
    steps[number] = dataclasses.replace(steps[number], **changes)
    return dataclasses.replace(trajectory, steps=tuple(steps))


def everywhere(**changes):
    trajectory = make_trajectory(num_steps=3)
    steps = tuple(dataclasses.replace(step, **changes) for step in trajectory.steps)
    return Trajectory(row=dataclasses.replace(trajectory.row, **changes), steps=steps)


def changed(array, value, place=0):
    array = array.copy()
    array[place] = value
    return array


STEP = make_trajectory(num_steps=3).steps[0]
SECOND = make_trajectory(num_steps=3).steps[1]
COUNT = len(STEP.sampled_tokens)


def test_good_trajectories_pass():
    for keywords in (
        {},
        {"num_steps": 1},
        {"num_steps": 6, "new_segment_at": 3},
        {"purpose": Purpose.EVALUATION},
        {"purpose": Purpose.EVALUATION_GREEDY},
        {"purpose": Purpose.EVALUATION, "split": Split.TRAIN},
        {"reward": 0.0},
        {"reward": -2.5, "success": False},
    ):
        assert check(make_trajectory(**keywords), LIMITS) is None


BAD = {
    "not a trajectory": ("wrong_type", None),
    "list of steps": ("wrong_type", Trajectory(row=make_trajectory().row, steps=list(make_trajectory().steps))),
    "no row": ("wrong_type", Trajectory(row=None, steps=())),
    "text as number": ("wrong_type", with_row(reward="1")),
    "bool as number": ("wrong_type", with_row(num_steps=True)),
    "wrong dtype": ("wrong_type", with_step(sampled_tokens=STEP.sampled_tokens.astype(np.int64))),
    "two dimensions": ("wrong_type", with_step(sampled_tokens=STEP.sampled_tokens[None])),
    "tuple elements": ("wrong_type", with_step(span_stage=(1, 2, 3, 4))),
    "none in tuple": ("wrong_type", with_step(reward_names=(None,), reward_values=(0.0,))),
    "schema version": ("schema_version", with_row(schema_version=99)),
    "step schema version": ("schema_version", with_step(schema_version=0)),
    "no env version": ("missing_version", with_row(env_version="")),
    "no reward version": ("missing_version", with_row(reward_version="")),
    "no prompt version": ("missing_version", with_row(prompt_version="")),
    "policy version": ("missing_version", with_row(policy_version=-1)),
    "no checksum": ("missing_version", with_step(policy_checksum="")),
    "no steps": ("step_numbers", Trajectory(row=make_trajectory().row, steps=())),
    "step twice": ("step_numbers", with_step(1, step=0)),
    "turn jumps": ("step_numbers", with_step(1, turn=2)),
    "other run": ("identity", with_row(run_id="other")),
    "step of another": ("identity", with_step(1, trajectory_id="9.9.9")),
    "other version on a step": ("identity", with_step(1, env_version="other@1+0")),
    "empty actor": ("identity", with_row(actor_id="")),
    "unexplained env version": ("unknown_version", everywhere(env_version="fake@2+0123456789ab")),
    "first policy version": ("identity", with_row(policy_version=7)),
    "task hash": ("identity", with_row(task_content="{}")),
    "half a fork": ("identity", with_row(fork_step=1)),
    "holdout in training": ("purpose", make_trajectory(split=Split.HOLDOUT)),
    "evaluation without number": (
        "purpose",
        dataclasses.replace(
            make_trajectory(purpose=Purpose.EVALUATION),
            row=dataclasses.replace(make_trajectory(purpose=Purpose.EVALUATION).row, evaluation=None),
        ),
    ),
    "training with number": ("purpose", with_row(evaluation=1)),
    "missing logprob": ("lengths", with_step(behaviour_logprobs=STEP.behaviour_logprobs[1:])),
    "missing model logprob": ("lengths", with_step(model_logprobs=STEP.model_logprobs[1:])),
    "nan": ("logprobs", with_step(behaviour_logprobs=changed(STEP.behaviour_logprobs, math.nan))),
    "minus inf": ("logprobs", with_step(model_logprobs=changed(STEP.model_logprobs, -math.inf))),
    "plus inf": ("logprobs", with_step(model_logprobs=changed(STEP.model_logprobs, math.inf))),
    "positive": ("logprobs", with_step(model_logprobs=changed(STEP.model_logprobs, 0.01))),
    "token too high": ("tokens", with_step(sampled_tokens=changed(STEP.sampled_tokens, 64))),
    "negative token": ("tokens", with_step(prompt_tokens=changed(STEP.prompt_tokens, -1))),
    "span short": ("spans", with_step(span_length=(*STEP.span_length[:-1], STEP.span_length[-1] - 1))),
    "span count": ("spans", with_step(span_length=STEP.span_length[:-1])),
    "span zero": ("spans", with_step(span_stage=(*STEP.span_stage, "answer"), span_length=(*STEP.span_length, 0))),
    "unknown stage": ("spans", with_step(span_stage=("chatter", *STEP.span_stage[1:]))),
    "model stage on given": ("spans", with_step(span_stage=("thought", *STEP.span_stage[1:]))),
    "given stage on sampled": ("spans", with_step(span_stage=(*STEP.span_stage[:-1], "tool_result"))),
    "span crosses": (
        "spans",
        with_step(span_stage=("system",), span_length=(len(STEP.prompt_tokens) + COUNT,)),
    ),
    "policy span short": ("policy_spans", with_step(span_policy_length=(COUNT - 1,))),
    "policy span negative": (
        "policy_spans",
        with_step(span_policy_version=(1, 1), span_policy_length=(COUNT + 1, -1)),
    ),
    "policy version falls": (
        "policy_spans",
        with_step(span_policy_version=(1, 0), span_policy_length=(COUNT - 1, 1)),
    ),
    "segment jumps": ("context", with_step(1, segment=2)),
    "segment unfounded": ("context", with_step(2, segment=1)),
    "context length": ("context", with_step(1, context_tokens=SECOND.context_tokens + 1)),
    "prefix hash": ("context", with_step(1, prefix_hash="0" * 32)),
    "one token of the past": (
        "context",
        with_step(prompt_tokens=changed(STEP.prompt_tokens, (STEP.prompt_tokens[0] + 1) % 64)),
    ),
    "context change": ("context_change", with_step(context_change="shrunk")),
    "dropped for nothing": ("context_change", with_step(1, context_dropped_tokens=3)),
    "dropped less than none": ("context_change", with_step(1, context_dropped_tokens=-1)),
    "truncated without a segment": (
        "context_change",
        with_step(1, context_change="truncated", context_dropped_tokens=3),
    ),
    "truncated by nothing": (
        "context_change",
        with_step(1, make_trajectory(num_steps=3, new_segment_at=1), context_change="segmented"),
    ),
    "step reward": ("rewards", with_step(reward=0.5)),
    "nan reward": ("rewards", with_step(reward=math.nan)),
    "reward names": ("rewards", with_step(reward_names=("a",))),
    "trajectory reward": ("rewards", with_row(reward=2.0)),
    "component sum": ("rewards", with_row(reward_values=(0.5,))),
    "component name": ("rewards", with_row(reward_names=("other",))),
    "infinite reward": (
        "rewards",
        with_step(2, with_row(reward=math.inf, reward_values=(math.inf,)), reward=math.inf, reward_values=(math.inf,)),
    ),
    "time backwards": ("times", with_step(finished_us=STEP.started_us - 1)),
    "steps overlap": ("times", with_step(1, started_us=STEP.finished_us - 1)),
    "ends early": ("times", with_row(finished_us=0)),
    "negative duration": ("times", with_step(generate_s=-1.0)),
    "nan duration": ("times", with_step(queue_s=math.nan)),
    "finish": ("endings", with_step(finish="tired")),
    "end reason": ("endings", with_row(end_reason="tired")),
    "cut success": ("endings", with_row(end_reason="max_steps")),
    "step count": ("sums", with_row(num_steps=4)),
    "token count": ("sums", with_row(num_sampled_tokens=4)),
    "segments": ("sums", with_row(num_segments=2)),
    "tool errors": ("sums", with_row(tool_errors=1)),
    "temperature": ("sampling", with_step(temperature=-1.0)),
    "top_p": ("sampling", with_step(top_p=0.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_rule_catches_its_breach(name):
    reason, trajectory = BAD[name]
    refusal = check(trajectory, LIMITS)
    assert refusal is not None
    assert (refusal.reason, bool(refusal.detail)) == (reason, True)
    # The path by the batch comes to the same verdict, and spares the neighbours.
    good = [make_trajectory(issue=1), make_trajectory(issue=2)]
    judged = judge([good[0], trajectory, good[1]], LIMITS)
    assert [t.row.trajectory_id for t in judged.accepted] == ["1.0.0", "2.0.0"]
    assert [r.reason for _, r in judged.refused] == [reason]
    assert judged.steps.num_rows == 4
    assert judged.rows.column("trajectory_id").to_pylist() == ["1.0.0", "2.0.0"]


def test_every_rule_has_a_breach_above():
    assert {reason for reason, _ in BAD.values()} == set(RULES)


def test_tiny_positive_rounding_is_tolerated():
    logprobs = changed(STEP.model_logprobs, 1e-7)
    assert check(with_step(model_logprobs=logprobs, behaviour_logprobs=logprobs), LIMITS) is None


def test_a_rewritten_prompt_may_repeat_what_the_model_said():
    trajectory = make_trajectory(num_steps=3, new_segment_at=1)
    step = trajectory.steps[1]
    stages = ("thought", *step.span_stage[1:])
    assert check(with_step(1, trajectory, span_stage=stages), LIMITS) is None


def test_text_that_utf8_cannot_carry_is_refused():
    judged = judge([with_row(task_content="\ud800"), make_trajectory(issue=3)], LIMITS)
    assert [r.reason for _, r in judged.refused] == ["identity"]  # the hash is no longer the content's
    odd = make_trajectory()
    steps = tuple(dataclasses.replace(step, engine="\ud800") for step in odd.steps)
    judged = judge([dataclasses.replace(odd, steps=steps), make_trajectory(issue=3)], LIMITS)
    assert [r.reason for _, r in judged.refused] == ["not_storable"]
    assert len(judged.accepted) == 1


def test_attempts_stand_or_fall_together_and_ids_are_unique():
    root = make_trajectory()
    fork = dataclasses.replace(
        root,
        row=dataclasses.replace(root.row, trajectory_id="0.0.0/1", parent_trajectory_id="0.0.0", fork_step=0),
        steps=tuple(dataclasses.replace(step, trajectory_id="0.0.0/1") for step in root.steps),
    )
    assert len(judge([root, fork], LIMITS).accepted) == 2
    bad_fork = dataclasses.replace(fork, row=dataclasses.replace(fork.row, num_steps=9))
    judged = judge([root, bad_fork, make_trajectory(issue=1)], LIMITS)
    assert [t.row.trajectory_id for t in judged.accepted] == ["1.0.0"]
    assert [r.reason for _, r in judged.refused] == ["sums", "sums"]
    judged = judge([root, root, make_trajectory(issue=1)], LIMITS)
    assert [t.row.trajectory_id for t in judged.accepted] == ["1.0.0"]


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["\ud800", "training", "holdout", "thought"]),
    st.binary(max_size=4),
    st.tuples(),
    st.tuples(st.integers(), st.none()),
    st.lists(st.integers(), max_size=3),
    st.tuples(st.text(max_size=3)),
    st.sampled_from([np.zeros(0, np.int32), np.zeros(3, np.int32), np.full(3, np.nan, np.float32), np.array(None)]),
    st.builds(object),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_the_gate_never_raises_and_whatever_it_accepts_can_be_stored(data):
    trajectory = make_trajectory(num_steps=2)
    row, steps = trajectory.row, list(trajectory.steps)
    for _ in range(data.draw(st.integers(1, 3))):
        value = data.draw(ODD_VALUES)
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(TrajectoryRow)]))
            row = dataclasses.replace(row, **{name: value})
        else:
            name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(StepRow)]))
            place = data.draw(st.integers(0, 1))
            steps[place] = dataclasses.replace(steps[place], **{name: value})
    odd = Trajectory(row=row, steps=tuple(steps))
    judged = judge([make_trajectory(issue=5), odd], LIMITS)
    assert judged.accepted[0].row.trajectory_id == "5.0.0"
    assert judged.steps.num_rows == 2 * len(judged.accepted)
    for trajectory, refusal in judged.refused:
        quarantined = quarantine_row(trajectory, refusal, run_id="run", quarantine_id="q", time_us=1)
        (back,) = from_table("quarantine", to_table("quarantine", [quarantined]))
        assert json.loads(back.payload).keys() == {"row", "steps"}


@pytest.mark.parametrize("odd", [None, 3, "text", object(), Trajectory(row=object(), steps=None), [1]])
def test_what_is_no_trajectory_at_all_is_quarantined_too(odd):
    judged = judge([odd, *make_group(size=2)], LIMITS)
    assert len(judged.accepted) == 2
    ((refused, refusal),) = judged.refused
    assert refusal.reason == "wrong_type"
    json.loads(quarantine_row(refused, refusal, run_id="run", quarantine_id="q", time_us=1).payload)


def test_payload_is_the_whole_record_as_json():
    payload = json.loads(payload_json(with_step(reward=math.nan)))
    assert payload["steps"][0]["reward"] == "nan"
    assert payload["steps"][0]["prompt_tokens"] == STEP.prompt_tokens.tolist()
    assert payload["row"]["purpose"] == "training"
    endless: list = []
    endless.append(endless)
    json.loads(payload_json(endless))
    row = quarantine_row(
        make_trajectory(), Refusal(reason="r", detail="d"), run_id="run", quarantine_id="q", time_us=5
    )
    assert (row.record_id, row.producer, row.record_kind) == ("0.0.0", "actor-0", "trajectories")


def test_only_kinds_that_were_explained_can_be_unknown():
    known = KnownVersions()
    assert not known.lacks("env", "a")
    known = KnownVersions.of([("env", "a")])
    assert (known.lacks("env", "a"), known.lacks("env", "b"), known.lacks("policy", "1")) == (
        False,
        True,
        False,
    )
    flight = with_step(span_policy_version=(1, 2), span_policy_length=(1, COUNT - 1))
    for explained, refused in (["1", "2"], False), (["1"], True), ([], False):
        limits = dataclasses.replace(
            LIMITS, versions=KnownVersions.of([("policy", each) for each in explained])
        )
        found = check(flight, limits)
        assert (found is not None and found.reason == "unknown_version") == refused


FORKS = {
    "good": (None, {}),
    "no such step": ("fork", {"fork_step": 3}),
    "before the first": ("fork", {"fork_step": -1}),
    "no such parent": ("fork", {"parent_trajectory_id": "9.9.9"}),
    "its own parent": ("fork", {"parent_trajectory_id": "0.0.0/1"}),
    "another step": ("fork", {"fork_step": 2}),
}


@pytest.mark.parametrize(("reason", "changes"), FORKS.values(), ids=FORKS)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_fork_continues_its_parent(reason, changes, recorded):
    parent = make_trajectory(num_steps=3)
    fork = make_fork(parent, 1, num_steps=2)
    fork = dataclasses.replace(fork, row=dataclasses.replace(fork.row, **changes))
    asked = []

    def find(ids):
        asked.append(set(ids))
        return FoundParents(steps={"0.0.0": parent_steps(parent)} if recorded and "0.0.0" in ids else {})

    judged = judge([fork] if recorded else [fork, parent], LIMITS, find_parents=find)
    if reason is None:
        assert not judged.refused
        assert asked == ([{"0.0.0"}] if recorded else [])
    else:
        assert {refusal.reason for _, refusal in judged.refused} == {reason}
        assert not judged.accepted  # of one attempt


def test_a_fork_whose_parent_can_not_be_read_now_is_refused_for_that_with_its_forks_and_nothing_else():
    gone = make_trajectory(num_steps=3)
    fork = make_fork(gone, 1, num_steps=2)
    nested = make_fork(fork, 0)
    other = make_trajectory(issue=5, num_steps=3)
    other_fork = make_fork(other, 1)

    def find(ids):
        assert set(ids) == {"0.0.0"}
        return FoundParents(steps={}, unreadable="the lake is away")

    judged = judge([nested, fork, other, other_fork], LIMITS, find_parents=find)
    assert [one.row.trajectory_id for one in judged.accepted] == ["5.0.0", "5.0.0/1"]
    assert {refusal.reason for _, refusal in judged.refused} == {"parent_unreadable"} <= OTHER_REASONS.keys()
    assert all("the lake is away" in refusal.detail for _, refusal in judged.refused)


def test_a_fork_that_changes_what_it_took_over_is_refused():
    parent = make_trajectory(num_steps=3, vocabulary=8)
    fork = make_fork(parent, 2, vocabulary=8)
    tokens = changed(fork.steps[0].prompt_tokens, (int(fork.steps[0].prompt_tokens[3]) + 1) % 8, 3)
    first = dataclasses.replace(fork.steps[0], prompt_tokens=tokens, prefix_hash=prefix_hash(tokens))
    judged = judge([parent, dataclasses.replace(fork, steps=(first,))], LIMITS)
    assert "does not begin with" in judged.refused[1][1].detail
    # A sub-agent with a context of its own took nothing over, so there is nothing to compare.
    own = make_trajectory(issue=5)
    own = dataclasses.replace(
        own, row=dataclasses.replace(own.row, parent_trajectory_id="0.0.0", fork_step=2)
    )
    assert len(judge([parent, own], LIMITS).accepted) == 2


def test_forks_fall_with_a_parent_that_fell_and_rings_are_refused():
    parent = make_trajectory(num_steps=3)
    fork = make_fork(parent, 1)
    nested = make_fork(fork, 0)
    assert len(judge([nested, fork, parent], LIMITS).accepted) == 3
    moved = dataclasses.replace(  # in an attempt of its own
        fork,
        row=dataclasses.replace(fork.row, attempt_id="x"),
        steps=tuple(dataclasses.replace(step, attempt_id="x") for step in fork.steps),
    )
    broken = dataclasses.replace(parent, row=dataclasses.replace(parent.row, num_steps=9))
    judged = judge([moved, broken], LIMITS)
    assert [refusal.reason for _, refusal in judged.refused] == ["fork", "sums"]
    ring = [
        dataclasses.replace(
            one, row=dataclasses.replace(one.row, parent_trajectory_id=other.row.trajectory_id, fork_step=0)
        )
        for one, other in (
            (make_trajectory(issue=1), make_trajectory(issue=2)),
            (make_trajectory(issue=2), make_trajectory(issue=1)),
        )
    ]
    assert {refusal.reason for _, refusal in judge(ring, LIMITS).refused} == {"fork"}


def test_the_page_names_every_rule_and_reason():
    page = (Path(__file__).parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
    assert [name for name in (*RULES, *OTHER_REASONS) if f"`{name}`" not in page] == []
