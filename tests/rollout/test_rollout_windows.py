"""Episodes whose context gets full: what the model is shown, what is on record, and that nothing exceeds the limit."""

from itertools import repeat
from typing import Any

import numpy as np
import pytest
from episode_parts import make_engine, make_episode, play
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_parts import DIALECTS, TOOL, FakeTime, ScriptedEnvironment, call, done, message, reply

from hotpot.experience import sequences
from hotpot.rollout import Clock, Dialect
from hotpot.testing.engine import FakeEngine
from hotpot.types import Action, Stage, StepResult, Trajectory

ALL = {name: make() for name, make in DIALECTS.items()}
COMPACT = ALL["compact"]
MARKER, HEADING = "\n\n[earlier steps left out]", "\n\n[notes on earlier steps]\n"
REQUEST = "note?"


def say(text: str, dialect: Dialect = COMPACT) -> np.ndarray:
    return dialect.encode_action(Action(answer=text))


def echo(text: str, dialect: Dialect = COMPACT) -> np.ndarray:
    return dialect.encode_action(call(text), tools=[TOOL])


def overflowing(
    outputs: list[Any],
    results: list[StepResult],
    *,
    policy: str,
    limit: int,
    dialect: Dialect = COMPACT,
    **more: Any,
) -> tuple[Trajectory, FakeEngine]:
    episode = make_episode(
        ScriptedEnvironment(results),
        dialect=dialect,
        context_overflow=policy,
        max_context_tokens=limit,
        handover_request=REQUEST,
        **{"max_steps": 50, "max_step_tokens": 20, "handover_tokens": 12} | more,
    )
    engine = make_engine([list(output) for output in outputs], max_context_tokens=limit)
    return play(episode, engine), engine


def shown(trajectory: Trajectory, step: int, dialect: Dialect = COMPACT) -> str:
    return dialect.tokenizer.decode(trajectory.steps[step].prompt_tokens)


def changes(trajectory: Trajectory) -> list[str]:
    return [step.context_change for step in trajectory.steps]


def test_truncation_leaves_out_the_oldest_exchanges_and_keeps_sampled_ids() -> None:
    outputs = [echo("a"), echo("b"), echo("c"), say("w17")]
    results = [reply("A" * 30), reply("B" * 30), reply("C" * 30), done()]
    trajectory, _ = overflowing(outputs, results, policy="truncate", limit=170)
    assert changes(trajectory) == ["none", "none", "none", "truncated"]
    last = trajectory.steps[3]
    opening = shown(trajectory, 0).removesuffix("<|end|><|assistant|>")
    turns = "".join(
        f"<|assistant|><|call|>echo(text={small})<|end|><|tool|>{big * 30}<|end|>"
        for small, big in ("bB", "cC")
    )
    assert shown(trajectory, 3) == f"{opening}{MARKER}<|end|>{turns}<|assistant|>"
    for kept in outputs[1:3]:
        assert any(
            np.array_equal(last.prompt_tokens[at : at + len(kept)], kept)
            for at in range(len(last.prompt_tokens))
        )
    assert [step.segment for step in trajectory.steps] == [0, 0, 0, 1]
    whole = trajectory.steps[2].context_tokens + len(outputs[2]) + len(trajectory.steps[2].prompt_tokens)
    assert last.context_dropped_tokens == whole - len(last.prompt_tokens)
    assert (trajectory.row.end_reason, trajectory.row.num_segments) == ("answered", 2)


def test_masks_of_windows_cover_exactly_what_was_sampled() -> None:
    outputs = [echo("a"), echo("b"), say("one"), echo("c"), say("two"), say("w17")]
    results = [reply("A" * 30), reply("B" * 30), reply("C" * 30), done()]
    trajectory, _ = overflowing(outputs, results, policy="segment", limit=150)
    assert "segmented" in changes(trajectory)
    parts = sequences(trajectory)
    assert [part.segment for part in parts] == list(range(trajectory.row.num_segments))
    sampled = np.concatenate([part.tokens[part.loss_mask] for part in parts])
    assert sampled.tolist() == np.concatenate(outputs).tolist()
    assert {part.reward for part in parts} == {trajectory.row.reward}


def test_a_note_is_asked_for_and_stands_for_all_but_the_newest_exchange() -> None:
    note = say("so far")
    outputs = [echo("a"), echo("b"), note, say("w17")]
    results = [reply("A" * 30), reply("B" * 30), done()]
    trajectory, engine = overflowing(outputs, results, policy="segment", limit=150)
    assert changes(trajectory) == ["none", "none", "handover", "segmented"]
    asked, last = trajectory.steps[2:]
    assert shown(trajectory, 2) == f"<|user|>{REQUEST}<|end|><|assistant|>"
    assert (asked.segment, asked.reward, asked.reward_names, asked.tool_name) == (0, 0.0, (), None)
    assert asked.span_stage == ("instruction", "handover")
    assert engine.submitted[2].max_tokens == 12
    assert engine.submitted[2].key.step == 2
    opening = shown(trajectory, 0).removesuffix("<|end|><|assistant|>")
    newest = f"<|assistant|><|call|>echo(text=b)<|end|><|tool|>{'B' * 30}<|end|><|assistant|>"
    assert shown(trajectory, 3) == f"{opening}{HEADING}so far<|end|>{newest}"
    stages = dict(zip(last.span_stage, last.span_length, strict=True))
    assert stages["handover"] == len(note) - 1
    assert trajectory.row.num_steps == 4


def test_a_second_note_takes_the_place_of_the_first() -> None:
    outputs = [echo("a"), echo("b"), say("one"), echo("c"), say("two"), say("w17")]
    results = [reply("A" * 30), reply("B" * 30), reply("C" * 30), done()]
    trajectory, _ = overflowing(outputs, results, policy="segment", limit=150)
    assert changes(trajectory) == ["none", "none", "handover", "segmented", "handover", "segmented"]
    assert "one" not in shown(trajectory, 5)
    assert f"{HEADING}two<|end|>" in shown(trajectory, 5)
    assert "B" not in shown(trajectory, 5)


@pytest.mark.parametrize(
    "note",
    [[9] * 12, [COMPACT.end_token], echo("x").tolist(), say("  ").tolist()],
    ids=["cut", "empty", "call", "blank"],
)
def test_without_a_note_the_window_is_truncated(note: list[int]) -> None:
    outputs = [echo("a"), echo("b"), note, say("w17")]
    trajectory, _ = overflowing(
        outputs, [reply("A" * 30), reply("B" * 30), done()], policy="segment", limit=150
    )
    assert changes(trajectory) == ["none", "none", "handover", "fallback"]
    assert MARKER in shown(trajectory, 3)
    assert trajectory.steps[2].tool_name is None
    assert trajectory.row.end_reason == "answered"


def test_notes_are_no_steps_against_max_steps_and_turns_begin_behind_them() -> None:
    results = [reply("A" * 30), StepResult(messages=(message("user", "B" * 30),)), done()]
    outputs = [echo("a"), echo("b"), say("so far"), say("w17")]
    trajectory, _ = overflowing(outputs, results, policy="segment", limit=150, max_steps=3)
    assert changes(trajectory) == ["none", "none", "handover", "segmented"]
    assert [step.turn for step in trajectory.steps] == [0, 0, 0, 1]
    assert trajectory.row.end_reason == "answered"


def test_an_episode_may_run_out_of_time_while_it_writes_a_note() -> None:
    time = FakeTime()
    episode = make_episode(
        ScriptedEnvironment([reply("A" * 30), reply("B" * 30)]),
        clock=Clock(time), context_overflow="segment", max_context_tokens=150, max_step_tokens=20,
        handover_tokens=12, handover_request=REQUEST, max_seconds=60.0,
    )  # fmt: skip
    engine = make_engine([echo("a").tolist(), echo("b").tolist(), say("so far").tolist()])
    episode.start()
    for waited_s in (1.0, 1.0, 70.0):
        engine.submit(episode.next_request())  # type: ignore[arg-type]
        episode.receive(engine.step()[0], waited_s=waited_s)
    assert episode.trajectory().row.end_reason == "max_seconds"


def test_a_thought_before_the_note_is_not_handed_over() -> None:
    dialect = ALL["thoughtful"]
    encode = dialect.tokenizer.encode_template
    for text, handed_over in {
        "<think>hm</think>\n\nso far": "so far", " so far": " so far", "<think>hm</think>\n\n": "", "<think>hm": "",
    }.items():  # fmt: skip
        output = dialect.parse_note(np.append(encode(text), dialect.end_token).astype(np.int32))
        parts = [output.tokens[slice(*part)] for part in output.body if not isinstance(part, str)]
        assert "".join(map(dialect.tokenizer.decode, parts)) == handed_over
        assert output.spans == ((Stage.HANDOVER, len(output.tokens)),)


@pytest.mark.parametrize("policy", ["truncate", "segment"])
def test_a_newest_exchange_that_fits_in_no_window_ends_the_episode(policy: str) -> None:
    outputs, results = [echo("a"), echo("b")], [reply("A"), reply("B" * 300)]
    trajectory, _ = overflowing(outputs, results, policy=policy, limit=180)
    assert (trajectory.row.end_reason, changes(trajectory)) == ("max_context", ["none", "none"])


def test_a_template_that_drops_thoughts_is_asked_in_a_segment_of_its_own() -> None:
    dialect = ALL["thoughtful"]
    think = np.append(dialect.tokenizer.encode_template("<think>hm hm hm</think>\n\nx"), dialect.end_token)
    outputs = [think, think, say("so far", dialect), say("w17", dialect)]
    results = [reply("A" * 60), reply("B" * 60), done()]
    trajectory, _ = overflowing(
        outputs, results, policy="segment", limit=480, dialect=dialect, max_step_tokens=60
    )
    assert changes(trajectory) == ["none", "none", "handover", "segmented"]
    assert [step.segment for step in trajectory.steps] == [0, 0, 1, 2]
    assert Stage.HANDOVER.value in trajectory.steps[3].span_stage


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_request_exceeds_the_limit_and_every_episode_ends(name: str, data: st.DataObject) -> None:
    """Whatever the limits, lengths and outputs: prompt and output fit the context, nothing goes on for ever."""
    dialect = ALL[name]
    policy = data.draw(st.sampled_from(["end", "truncate", "segment"]))
    opening = 120 if name == "compact" else 290
    limit = opening + data.draw(st.integers(0, 200))
    longest = len(echo("abc", dialect))
    step, handover = data.draw(st.integers(1, 3 * longest)), data.draw(st.integers(1, 40))
    max_steps = data.draw(st.integers(1, 10))
    texts = data.draw(st.lists(st.integers(0, 80), min_size=max_steps, max_size=max_steps))
    users = data.draw(st.lists(st.booleans(), min_size=max_steps, max_size=max_steps))
    spoken = [
        echo("a", dialect),
        echo("abc", dialect),
        *[say("so", dialect)] * 4,
        np.array([dialect.end_token]),
    ]
    rarely = st.sampled_from([False] * 30 + [True])
    outputs = [
        [9] * 100 if data.draw(rarely) else data.draw(st.sampled_from(spoken)).tolist()
        for _ in range(2 * max_steps + 1)
    ]
    results = [
        StepResult(messages=(message("user" if user else "tool", "x" * size),))
        for size, user in zip(texts, users, strict=True)
    ]
    engine = make_engine([*outputs, *repeat([9] * 400, 20)], max_context_tokens=limit)
    episode = make_episode(
        ScriptedEnvironment(results), dialect=dialect, context_overflow=policy, max_context_tokens=limit,
        max_step_tokens=step, handover_tokens=handover, handover_request=REQUEST, max_steps=max_steps,
    )  # fmt: skip
    trajectory = play(episode, engine)
    for request, recorded in zip(engine.submitted, trajectory.steps, strict=True):
        assert 0 < request.max_tokens <= limit - len(request.prompt)
        assert recorded.context_tokens + len(recorded.sampled_tokens) <= limit
        assert len(recorded.sampled_tokens) <= (handover if recorded.context_change == "handover" else step)
    notes = changes(trajectory).count("handover")
    assert trajectory.row.num_steps - notes <= max_steps
    assert notes < max_steps
    assert trajectory.row.end_reason in {"max_context", "max_steps", "max_step_tokens"}
    if policy == "end":
        assert set(changes(trajectory)) == {"none"}
    if policy == "truncate":
        assert set(changes(trajectory)) <= {"none", "truncated"}
    sampled = [t for part in sequences(trajectory) for t in part.tokens[part.loss_mask].tolist()]
    assert sampled == [t for recorded in trajectory.steps for t in recorded.sampled_tokens.tolist()]
