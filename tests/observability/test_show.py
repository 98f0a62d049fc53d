import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from hotpot.errors import UsageError
from hotpot.observability.show import (
    load_forks,
    load_trajectory,
    pieces,
    show_trajectory,
    spans,
    trajectory_json,
)
from hotpot.testing.records import make_fork, make_trajectory


def decode(tokens) -> str:
    return "".join(f"<{token}>" for token in tokens)


@pytest.fixture
def stored(reader_over):
    made = make_trajectory(issue=3, num_steps=2, reward=1.0)
    return made, reader_over({"trajectories": [made.row], "steps": list(made.steps)})


def test_spans_cover_the_tokens_in_order_and_only_sampled_ones_have_probabilities(stored) -> None:
    made, reader = stored
    _, steps = load_trajectory(reader, made.row.trajectory_id)
    for step, original in zip(steps, made.steps, strict=True):
        found = list(spans(step))
        tokens = [token for _, part, _ in found for token in part]
        assert tokens == [*original.prompt_tokens, *original.sampled_tokens]
        logprobs = [value for _, _, part in found if part is not None for value in part]
        assert np.array_equal(np.float32(logprobs), original.model_logprobs)
        assert [stage for stage, _, _ in found] == list(original.span_stage)


def test_a_fork_shows_its_parent_its_forks_and_the_tokens_it_took_over(reader_over) -> None:
    parent = make_trajectory(num_steps=4, new_segment_at=1)
    fork = make_fork(parent, 2)
    nested = make_fork(fork, 0, number=3)
    made = [parent, fork, nested]
    reader = reader_over(
        {"trajectories": [t.row for t in made], "steps": [step for t in made for step in t.steps]}
    )

    def shown(trajectory):
        row, steps = load_trajectory(reader, trajectory.row.trajectory_id)
        forks, file = load_forks(reader, row, steps), io.StringIO()
        show_trajectory(Console(file=file, width=200), row, steps, decode, forks=forks)
        return forks, file.getvalue(), trajectory_json(row, steps, decode, forks)

    forks, text, as_json = shown(fork)
    taken = parent.steps[2].context_tokens
    assert forks.taken_over == as_json["taken_over_tokens"] == taken
    assert f"fork of 0.0.0 at its step 2: the first {taken} tokens are the parent's" in text
    assert "forks from it: 0.0.0/1/3 at step 0" in text
    assert as_json["children"] == [{"trajectory_id": "0.0.0/1/3", "fork_step": 0}]
    marked = [line for line in text.splitlines() if line.startswith("[^")]
    assert "".join(line.partition("] ")[2] for line in marked) == decode(fork.steps[0].prompt_tokens[:taken])
    # What the parent sampled is given here, with the stage it had and without probabilities.
    thought = next(span for span in as_json["steps"][0]["spans"] if span["stage"] == "thought")
    assert (thought["sampled"], thought["model_logprobs"]) == (False, None)
    _, text, as_json = shown(parent)
    assert "forks from it: 0.0.0/1 at step 2" in text
    assert "[^" not in text
    lost = reader_over({"trajectories": [fork.row], "steps": list(fork.steps)})
    assert load_forks(lost, *load_trajectory(lost, "0.0.0/1")).taken_over == 0


def test_a_span_across_the_edge_is_cut_there() -> None:
    step = {"prompt_tokens": [1, 2], "sampled_tokens": [3], "model_logprobs": [-1.0], "span_stage": ["answer"], "span_length": [3]}  # fmt: skip
    assert list(spans(step)) == [("answer", [1, 2], None), ("answer", [3], [-1.0])]


def test_show_prints_every_step_with_stages_probabilities_and_reward(stored) -> None:
    made, reader = stored
    file = io.StringIO()
    row, steps = load_trajectory(reader, made.row.trajectory_id)
    show_trajectory(Console(file=file, width=200), row, steps, decode)
    text = file.getvalue()
    for shown in ("3.0.0", "solved", "reward 1 (total 1)", "stages:", "tool_result", "step 0", "step 1", "tool find",
                  made.row.env_version, "ms", "reused"):  # fmt: skip
        assert shown in text
    half = made.steps[0].span_length[0]
    assert f"[system] {decode(made.steps[0].prompt_tokens[:half])}\n[instruction] " in text


def test_what_the_context_limit_did_stands_on_the_step(reader_over) -> None:
    made = make_trajectory(num_steps=3, new_segment_at=2)
    plain, asked, shorter = made.steps
    steps = [
        plain,
        dataclasses.replace(asked, context_change="handover"),
        dataclasses.replace(
            shorter, context_change="segmented", context_dropped_tokens=41, num_preemptions=2
        ),
    ]
    reader, file = reader_over({"trajectories": [made.row], "steps": steps}), io.StringIO()
    show_trajectory(Console(file=file, width=200), *load_trajectory(reader, made.row.trajectory_id), decode)
    text = file.getvalue()
    assert "step 0 segment 0 ─" in text
    assert "step 1 segment 0 · context full: asked for a note" in text
    assert (
        "step 2 segment 1 · context full: a note for all but the newest exchange, 41 tokens shorter" in text
    )
    assert text.count("preempted 2 times") == 1


def test_a_terminal_gets_colours_in_place_of_labels(stored) -> None:
    made, reader = stored
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=True, color_system="standard")
    show_trajectory(console, *load_trajectory(reader, made.row.trajectory_id), decode)
    assert "[system]" not in file.getvalue()
    half = made.steps[0].span_length[0]
    instruction = made.steps[0].prompt_tokens[half:]
    assert f"\x1b[36m{decode(instruction)}\x1b[0m" in file.getvalue()


def test_unlikely_tokens_are_marked_with_their_probability(reader_over) -> None:
    made = make_trajectory(num_steps=1)
    logprobs = np.full(len(made.steps[0].sampled_tokens), -0.01, np.float32)
    logprobs[2] = np.log(0.03)
    step = dataclasses.replace(made.steps[0], model_logprobs=logprobs)
    file = io.StringIO()
    reader = reader_over({"trajectories": [made.row], "steps": [step]})
    show_trajectory(Console(file=file, width=200), *load_trajectory(reader, made.row.trajectory_id), decode)
    assert f"<{step.sampled_tokens[2]}>‹0.03›" in file.getvalue()
    assert file.getvalue().count("‹0.03›") == 1


def test_control_characters_of_a_model_never_reach_the_terminal(stored) -> None:
    made, reader = stored
    file = io.StringIO()
    row, steps = load_trajectory(reader, made.row.trajectory_id)
    show_trajectory(
        Console(file=file, width=200), row, steps, lambda tokens: "\x1b]0;x\x07[red]" * len(tokens)
    )
    assert "\x1b" not in file.getvalue()
    assert "␛]0;x␇[red]" in file.getvalue()


def test_tokens_of_one_character_stay_together() -> None:
    table = {(1,): "a", (2,): "�", (2, 3): "ä", (4,): "b"}
    found = list(pieces([1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4], lambda tokens: table[tuple(tokens)]))
    assert found == [("a", -0.1), ("ä", -0.3), ("b", -0.4)]


def test_json_holds_text_and_tokens(stored) -> None:
    made, reader = stored
    document = json.loads(
        json.dumps(trajectory_json(*load_trajectory(reader, made.row.trajectory_id), decode))
    )
    assert document["trajectory_id"] == made.row.trajectory_id
    sampled = [span for span in document["steps"][0]["spans"] if span["sampled"]]
    assert "".join(span["text"] for span in sampled) == decode(made.steps[0].sampled_tokens)


def test_an_unknown_trajectory_names_near_ones(stored) -> None:
    with pytest.raises(UsageError, match=r"no trajectory '3\.0\.1'; nearest: 3\.0\.0"):
        load_trajectory(stored[1], "3.0.1")
