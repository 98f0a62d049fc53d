"""Changes of versions in words, line by line as (text, style); knows no terminal."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotpot.observability.changes import Difference
    from hotpot.observability.jumps import Estimate
    from hotpot.observability.lineage import TrajectoryLineage
    from hotpot.observability.run_changes import Around, ExplainedChange, RunChanges
    from hotpot.observability.version_changes import Contrast

Line = tuple[str, str]

MOST_DIFFERENCES = 12
"""Differences shown of one change; ``--json`` has all."""


def counted(number: int, one: str, many: str = "") -> str:
    """Return ``number`` with what it counts, in the plural where it is not one."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def heading(found: "RunChanges") -> Iterator[Line]:
    """Yield how many changes there were, their order in time, and the policy publishes in one line."""
    if found.changes:
        yield (
            f"{counted(len(found.changes), 'change')} of versions in training, most likely influence on the reward first",
            "bold",
        )  # fmt: skip
        in_time = sorted(found.changes, key=lambda change: change.change.place)
        order = ", ".join(f"{one.change.kind} ({_where(one)}, rank {one.rank})" for one in in_time)
        yield f"  in order of time: {order}", ""
    else:
        yield "no version but the policy's changed in training", ""
    folded = found.publishes
    if folded is not None:
        score = (
            f"the largest jump has score {folded.largest_score:.1f} (version {folded.at_version}), below "
            f"{folded.threshold:.1f}: none stands out"
            if folded.largest_score
            else "too few groups to tell whether one stands out"
        )
        publishes = counted(folded.count, "policy publish", "policy publishes")
        yield (
            f"  {publishes}, {folded.first_version} to {folded.last_version}: {score}",
            "dim",
        )


def change_lines(found: "ExplainedChange") -> Iterator[Line]:
    """Yield one change: what, when, the reward and the KL before and after, and what differs in the source."""
    change = found.change
    at = datetime.fromtimestamp(change.time_us / 1e6).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    where = f"{change.kind} at {_where(found)}, after {change.steps_before} steps, {at}"
    yield f"{found.rank}. {where}: score {change.score:.1f}", "bold"
    yield f"   {change.old} -> {change.new}", ""
    steps, trajectories = change.num_steps, change.num_trajectories
    counts = f"steps {steps[0]} -> {steps[1]}, trajectories {trajectories[0]} -> {trajectories[1]}"
    yield f"   {counts}", ""
    yield f"   reward {_contrast(change.reward)}", ""
    if change.jump is not None:
        size = _signed(change.jump.size, change.jump.low, change.jump.high)
        yield (
            f"     against its trend {size}, {abs(change.jump.effect):.1f} standard deviations of a group",
            "",
        )
    for name in ("approx_kl", "reference_kl"):
        contrast = getattr(change, name)
        if contrast.before is not None or contrast.after is not None:
            yield f"   {name} {_contrast(contrast)}", ""
    if change.together:
        yield (
            f"   changed together with {', '.join(change.together)}: the reward can't tell them apart", "yellow",
        )  # fmt: skip
    for difference in found.differences[:MOST_DIFFERENCES]:
        for text, style in difference_lines(difference):
            yield f"   {text}", style
    if len(found.differences) > MOST_DIFFERENCES:
        yield (
            f"   ... and {counted(len(found.differences) - MOST_DIFFERENCES, 'more difference')}; --json has all",
            "dim",
        )


def chain_lines(
    found: "TrajectoryLineage", run_id: str, checkpoints: Mapping[int, Path | None]
) -> Iterator[Line]:
    """Yield the chain of one trajectory: checkpoint, publish, trajectory, the updates that consumed it, its family.

    ``checkpoints`` is where the weights of each policy version lie, if they were kept.
    """
    for policy in found.policies:
        source = "the starting model" if policy.made_by_update is None else f"update {policy.made_by_update}"
        if policy.made_by_update is not None and policy.origin not in {"", run_id}:
            source += f" ({policy.origin})"
        yield f"{source} published policy version {policy.policy_version} (checksum {policy.checksum})", ""
        kept = checkpoints[policy.policy_version]
        yield (f"  checkpoint {kept}" if kept is not None else "  its checkpoint was not kept"), ""
        yield f"  which sampled {policy.num_tokens} tokens of trajectory {found.trajectory_id}", ""
    yield (
        f"trajectory {found.trajectory_id}: {found.purpose}, reward {found.reward:g}, task {found.task_id}", "",
    )  # fmt: skip
    yield f"  env {found.env_version}, reward {found.reward_version}, prompt {found.prompt_version}", ""
    for used in found.consumptions:
        tokens = f"{used.source}, {used.epochs} epochs, {used.num_loss_tokens} loss tokens"
        new = f"published policy version {used.new_policy_version}"
        yield f"update {used.update} consumed it ({tokens}) and {new}", ""
    if not found.consumptions:
        yield "no update consumed it", ""
    if (gone := found.discarded) is not None:
        told = f"{gone.reason}, {gone.staleness} policy versions behind"
        yield f"it was discarded during update {gone.update} ({told})", ""
    if found.family:
        yield "its family:", ""
    for one in found.family:
        forked = "" if one.parent_trajectory_id is None else f", forked at step {one.fork_step}"
        if one.depth == 0 and one.parent_trajectory_id is not None:
            forked += f" of {one.parent_trajectory_id}, which is not on record"
        used_by = f"updates {', '.join(map(str, one.updates))}" if one.updates else "no update"
        here = one.trajectory_id == found.trajectory_id
        facts = f"{one.num_steps} steps, reward {one.reward:g}{forked}, consumed by {used_by}"
        yield f"  {'  ' * one.depth}{one.trajectory_id}{' (this one)' if here else ''}: {facts}", ""


def difference_lines(difference: "Difference") -> Iterator[Line]:
    """Yield one difference: where, then what stood there and what stands there now."""
    yield difference.place, "bold"
    for sign, text, style in (("-", difference.old, "red"), ("+", difference.new, "green")):
        for line in text.splitlines():
            yield f"  {sign} {line}", style


def curve_rows(found: "Around") -> list[dict[str, Any]]:
    """Return the rows of the curve around an update, for a table."""
    kinds = {one.rank: one.change.kind for one in found.changes}
    return [
        {
            "update": f"{'>' if point.update == found.update else ' '} {point.update}",
            "reward": "-" if point.reward is None else _interval(point.reward),
            "success": point.success_rate,
            "approx_kl": point.approx_kl,
            "reference_kl": point.reference_kl,
            "policy": f"{point.policy_version} -> {point.new_policy_version}",
            "changed": ", ".join(f"{kinds[rank]} (rank {rank})" for rank in point.changes) or None,
        }
        for point in found.curve
    ]


def _where(found: "ExplainedChange") -> str:
    update = found.change.update
    return "the next update" if update is None else f"update {update}"


def _contrast(contrast: "Contrast") -> str:
    sides = " -> ".join(
        "-" if side is None else _interval(side) for side in (contrast.before, contrast.after)
    )
    change = contrast.difference
    return sides if change is None else f"{sides}: {_signed(change.mean, change.low, change.high)}"


def _interval(estimate: "Estimate") -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:.3g}"
    return f"{estimate.mean:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]"


def _signed(size: float, low: float | None, high: float | None) -> str:
    return f"{size:+.3g}" if low is None or high is None else f"{size:+.3g} [{low:+.3g}, {high:+.3g}]"
