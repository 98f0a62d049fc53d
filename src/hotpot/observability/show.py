"""One trajectory, step by step: what was given, what was sampled with which probability, what came of it.

Colours tell the stages apart; a sampled token below the threshold probability is underlined; what a fork took over from
its parent is dim. Reads rows through a reader and turns tokens to text through a callable; it knows no tokenizer and no
model.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from rich.console import Console
from rich.text import Text

from hotpot.errors import UsageError
from hotpot.metrics import quoted
from hotpot.observability.lineage import unknown_trajectory
from hotpot.observability.queries import SqlReader, rows

Decode = Callable[[Sequence[int]], str]

STAGE_STYLES = {
    "system": "bright_black",
    "instruction": "cyan",
    "thought": "magenta",
    "tool_call": "yellow",
    "tool_result": "green",
    "answer": "bold blue",
    "handover": "bold cyan",
}
"""How each stage is drawn."""

LOW_PROBABILITY = 0.1
"""Sampled tokens less likely than this are marked."""

_LOW_STYLE = "underline red"

# What a model or a tool wrote must not steer the terminal: control characters are drawn, not sent.
_VISIBLE = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forks:
    """What binds a trajectory to others: how many of its first tokens its parent already had, and (id, step) of each fork
    from it, in order of the step."""

    taken_over: int = 0
    children: tuple[tuple[str, int], ...] = ()


def load_trajectory(reader: SqlReader, trajectory_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the row of a trajectory and the rows of its steps in order, as plain values.

    Raises
    ------
    UsageError: the run has no such trajectory.
    """
    wanted = f"WHERE trajectory_id = {quoted(trajectory_id)}"
    found = rows(reader, f"SELECT * FROM trajectories {wanted}")
    if not found:
        raise UsageError(unknown_trajectory(reader, trajectory_id))
    return found[0], rows(reader, f"SELECT * FROM steps {wanted} ORDER BY step")


def load_forks(reader: SqlReader, row: dict[str, Any], steps: Sequence[dict[str, Any]]) -> Forks:
    """Return how a trajectory (as :func:`load_trajectory` gives it) hangs together with its parent and its forks.

    Taken over is what its first prompt has in common with the parent's tokens up to and with the fork step; a parent that
    was refused or lost leaves 0.
    """
    children = rows(
        reader,
        "SELECT trajectory_id, fork_step FROM trajectories "
        f"WHERE parent_trajectory_id = {quoted(row['trajectory_id'])} ORDER BY fork_step, trajectory_id",
    )
    taken_over = 0
    if row["parent_trajectory_id"] is not None and steps:
        parent = rows(
            reader,
            "SELECT segment, prompt_tokens, sampled_tokens FROM steps WHERE trajectory_id = "
            f"{quoted(row['parent_trajectory_id'])} AND step <= {int(row['fork_step'])} ORDER BY step",
        )
        known = [
            token
            for step in parent
            if step["segment"] == parent[-1]["segment"]
            for token in (*step["prompt_tokens"], *step["sampled_tokens"])
        ]
        pairs = zip(known, steps[0]["prompt_tokens"], strict=False)
        taken_over = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Forks(
        taken_over=taken_over,
        children=tuple((child["trajectory_id"], child["fork_step"]) for child in children),
    )


def trajectory_json(
    row: dict[str, Any], steps: Sequence[dict[str, Any]], decode: Decode, forks: Forks | None = None
) -> dict[str, Any]:
    """Return the whole trajectory as plain values: its row, its forks, and each step with its spans as text and tokens."""
    forks = forks or Forks()
    return {
        **row,
        "taken_over_tokens": forks.taken_over,
        "children": [{"trajectory_id": child, "fork_step": step} for child, step in forks.children],
        "steps": [
            {
                **step,
                "spans": [
                    {
                        "stage": stage,
                        "text": decode(tokens),
                        "tokens": list(tokens),
                        "sampled": logprobs is not None,
                        "model_logprobs": None if logprobs is None else list(logprobs),
                    }
                    for stage, tokens, logprobs in spans(step, cut=_taken_over(step, forks))
                ],
            }
            for step in steps
        ],
    }


def show_trajectory(
    console: Console,
    row: dict[str, Any],
    steps: Sequence[dict[str, Any]],
    decode: Decode,
    *,
    forks: Forks | None = None,
    low_probability: float = LOW_PROBABILITY,
) -> None:
    """Print a trajectory: heading, legend, then each step with its text, log-probabilities, reward and timing."""
    # Without colours the stages are written out.
    labelled = not console.is_terminal or console.no_color
    forks = forks or Forks()
    console.print(_heading(row))
    for line in _fork_lines(row, forks):
        console.print(line, style="bold", highlight=False, markup=False)
    console.print(_legend(low_probability))
    for step in steps:
        console.rule(_step_title(step), align="left", style="dim")
        cut = _taken_over(step, forks)
        console.print(_step_text(step, decode, low_probability, cut, labelled=labelled), soft_wrap=True)
        console.print(_step_facts(step), style="dim", highlight=False, markup=False)


def spans(
    step: dict[str, Any], *, cut: int = 0
) -> Iterator[tuple[str, Sequence[int], Sequence[float] | None]]:
    """Yield (stage, tokens, model log-probabilities or None where given) over a step's tokens, in order.

    A span that holds given and sampled tokens is cut in two, and one that reaches over token ``cut`` there.
    """
    given = step["prompt_tokens"]
    tokens = [*given, *step["sampled_tokens"]]
    begin = 0
    for stage, length in zip(step["span_stage"], step["span_length"], strict=True):
        end = begin + length
        edges = [begin, *sorted(edge for edge in {len(given), cut} if begin < edge < end), end]
        for first, last in pairwise(edges):
            sampled = first >= len(given)
            logprobs = step["model_logprobs"][first - len(given) : last - len(given)] if sampled else None
            yield stage, tokens[first:last], logprobs
        begin = end


def pieces(tokens: Sequence[int], logprobs: Sequence[float], decode: Decode) -> Iterator[tuple[str, float]]:
    """Yield (text, log-probability) piece by piece; tokens that only together make a character stay together.

    The log-probability of a piece is the least of its tokens'.
    """
    begin = 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[begin:end])
        if "�" in text and end < len(tokens) and end - begin < 4:
            continue
        yield text, min(logprobs[begin:end])
        begin = end


def _heading(row: dict[str, Any]) -> Text:
    text = Text()
    verdict = ("solved", "bold green") if row["success"] else ("not solved", "bold red")
    text.append(f"trajectory {row['trajectory_id']} of run {row['run_id']}: ", style="bold")
    text.append(*verdict)
    text.append(f", reward {row['reward']:g} ({_components(row)}), ended: {row['end_reason']}\n")
    text.append(
        f"task {row['task_id']} ({row['split']}) in {row['env']}, {row['purpose']}, group {row['group_id']}, "
    )
    text.append(
        f"{row['num_steps']} steps, {row['num_prompt_tokens']} + {row['num_sampled_tokens']} tokens, "
    )
    text.append(f"{(row['finished_us'] - row['started_us']) / 1e6:.3f} s\n")
    text.append(f"env {row['env_version']}  reward {row['reward_version']}\n", style="dim")
    text.append(f"prompt {row['prompt_version']}  policy {row['policy_version']}  ", style="dim")
    text.append(f"schema {row['schema_version']}", style="dim")
    return text


def _fork_lines(row: dict[str, Any], forks: Forks) -> Iterator[str]:
    if row["parent_trajectory_id"] is not None:
        yield (
            f"fork of {row['parent_trajectory_id']} at its step {row['fork_step']}: the first {forks.taken_over} tokens are "
            "the parent's (dim, or marked ^)"
        )
    if forks.children:
        yield "forks from it: " + ", ".join(f"{child} at step {step}" for child, step in forks.children)


def _taken_over(step: dict[str, Any], forks: Forks) -> int:
    return forks.taken_over if step["step"] == 0 else 0


def _legend(low_probability: float) -> Text:
    text = Text("stages: ")
    for stage, style in STAGE_STYLES.items():
        text.append(stage, style=style)
        text.append("  ")
    text.append(f"probability < {low_probability:g}", style=_LOW_STYLE)
    return text


_CHANGES = {
    "truncated": "context full: the oldest exchanges left out, {} tokens",
    "handover": "context full: asked for a note",
    "segmented": "context full: a note for all but the newest exchange, {} tokens shorter",
    "fallback": "context full and no note: the oldest exchanges left out, {} tokens",
}
"""What is said of a step before which the context limit changed the prompt."""


def _step_title(step: dict[str, Any]) -> str:
    change = _CHANGES.get(step["context_change"], "").format(step["context_dropped_tokens"])
    return f"turn {step['turn']} step {step['step']} segment {step['segment']}{change and f' · {change}'}"


def _step_text(
    step: dict[str, Any], decode: Decode, low_probability: float, taken_over: int, *, labelled: bool
) -> Text:
    text, least, place = Text(), math.log(low_probability), 0
    for stage, tokens, logprobs in spans(step, cut=taken_over):
        taken, place = place < taken_over, place + len(tokens)
        style = f"{STAGE_STYLES.get(stage, '')}{' dim' if taken else ''}"
        if labelled:
            text.append(f"{chr(10) if text else ''}[{'^' if taken else ''}{stage}] ")
        if logprobs is None:
            text.append(decode(tokens).translate(_VISIBLE), style=style)
            continue
        for piece, logprob in pieces(tokens, logprobs, decode):
            low = logprob < least
            text.append(piece.translate(_VISIBLE), style=f"{style} {_LOW_STYLE}" if low else style)
            if low:
                text.append(f"‹{math.exp(logprob):.2g}›", style="dim red")
    return text


def _step_facts(step: dict[str, Any]) -> str:
    logprobs = step["model_logprobs"]
    parts = [
        f"sampled {len(step['sampled_tokens'])} tokens",
        f"log-probability sum {sum(logprobs):.3f}, least {min(logprobs):.3f}"
        if logprobs
        else "nothing sampled",
        f"finish {step['finish']}",
        f"tool {step['tool_name']}{' (error)' if step['tool_error'] else ''}"
        if step["tool_name"]
        else ("answered with an error" if step["tool_error"] else "no tool"),
        f"reward {step['reward']:g} ({_components(step)})",
        f"policy {'/'.join(str(found) for found in dict.fromkeys(step['span_policy_version']))}",
        (
            f"queue {step['queue_s'] * 1e3:.1f} ms, generate {step['generate_s'] * 1e3:.1f} ms, "
            f"environment {step['environment_s'] * 1e3:.1f} ms"
        ),
        f"reused {step['reused_tokens']} of {step['context_tokens']} context tokens",
        *([f"preempted {step['num_preemptions']} times"] if step["num_preemptions"] else []),
    ]
    return " · ".join(parts)


def _components(row: dict[str, Any]) -> str:
    pairs = zip(row["reward_names"], row["reward_values"], strict=True)
    return ", ".join(f"{name} {value:g}" for name, value in pairs) or "no components"
