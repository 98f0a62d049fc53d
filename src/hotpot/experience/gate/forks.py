"""What a fork must have in common with the trajectory it names as its parent. Pure.

A fork is complete in itself: the prompt of its step 0 repeats, as given tokens, what the model had before it when it
sampled the parent's step ``fork_step``, and goes on from there. What is checked, from the parent's lengths and prefix
hashes alone, so that no token of the parent is read:

- the parent has that step;
- where the prompt of the fork's step 0 holds tokens of a stage only the model speaks in, they were taken over, so the
  prompt must begin with the parent's context at the fork, token for token. A fork without such tokens (a sub-agent with
  a context of its own, a fork at the first step) is not compared.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hotpot.ids import prefix_hash
from hotpot.types import Stage, Trajectory

_MODEL_STAGES = frozenset(
    {Stage.THOUGHT.value, Stage.TOOL_CALL.value, Stage.ANSWER.value, Stage.HANDOVER.value}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentStep:
    """What is kept of one step of a parent: its segment, its lengths in tokens, and its prefix hash."""

    segment: int
    num_prompt: int
    num_sampled: int
    prefix_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundParents:
    """The steps of those trajectories that are known to be on record, by id; and why the record could not be asked for the
    others, empty where it was."""

    steps: Mapping[str, Sequence[ParentStep]]
    unreadable: str = ""


FindParents = Callable[[Collection[str]], FoundParents]
"""Looks the named trajectories up. Never raises."""


def no_parents(ids: Collection[str]) -> FoundParents:
    """Find none: for a gate without a record behind it."""
    del ids
    return FoundParents(steps={})


def parent_steps(trajectory: Trajectory) -> list[ParentStep]:
    """Return what is kept of a trajectory's steps, in order."""
    return [
        ParentStep(
            segment=step.segment,
            num_prompt=len(step.prompt_tokens),
            num_sampled=len(step.sampled_tokens),
            prefix_hash=step.prefix_hash,
        )
        for step in trajectory.steps
    ]


def fork_words(fork: Trajectory, parent: Sequence[ParentStep]) -> str | None:
    """Return why ``fork`` can't have forked from ``parent``, or None where it can."""
    at = fork.row.fork_step
    if at is None or not 0 <= at < len(parent):
        return (
            f"fork_step = {at}, but the parent {fork.row.parent_trajectory_id!r} has the steps 0 to {len(parent) - 1}; "
            "name the step whose context it took over"
        )
    if not _takes_over(fork):
        return None
    lengths = [
        length
        for step in parent[:at]
        if step.segment == parent[at].segment
        for length in (step.num_prompt, step.num_sampled)
    ]
    lengths.append(parent[at].num_prompt)
    given, chain, end = fork.steps[0].prompt_tokens, "", 0
    if len(given) >= sum(lengths):
        for length in lengths:
            begin, end = end, end + length
            chain = prefix_hash(given[begin:end], extends=chain)
        if chain == parent[at].prefix_hash:
            return None
    return (
        f"the prompt of its step 0 ({len(given)} tokens) does not begin with the {sum(lengths)} tokens that "
        f"{fork.row.parent_trajectory_id!r} had before it sampled step {at}; a fork repeats its parent up to there"
    )


def _takes_over(fork: Trajectory) -> bool:
    first, end = fork.steps[0], 0
    for stage, length in zip(first.span_stage, first.span_length, strict=True):
        if end >= len(first.prompt_tokens):
            return False
        if stage in _MODEL_STAGES:
            return True
        end += length
    return False
