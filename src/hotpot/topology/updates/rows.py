"""From what the parts report to the rows of the lake: pure functions, no clock but the caller's, no state.

One place where a learner's result, the collected trajectories and the loop's wall times meet the tables ``updates``,
``groups``, ``learned_tokens``, ``consumptions``, ``versions`` and ``events``.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hotpot.ids import canonical_json
from hotpot.learner import GroupStatistics, UpdateResult
from hotpot.rollout import MixedEnvironment
from hotpot.topology.updates.batch import UpdateBatch
from hotpot.types import (
    SCHEMA_VERSION,
    TABLES,
    ConsumptionRow,
    EventRow,
    GroupRow,
    LearnedTokensRow,
    Trajectory,
    UpdateRow,
    VersionRow,
)
from hotpot.versions import Version


def now_us() -> int:
    """Return microseconds since the Unix epoch."""
    return time.time_ns() // 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFrame:
    """What surrounds one update: where it started, what it became, and the main loop's wall time by span."""

    run_id: str
    parent_update: int
    new_policy_version: int
    started_us: int
    seconds: Mapping[str, float]
    seed: int
    weights_checksum: str
    deterministic: bool


def update_row(frame: UpdateFrame, batch: UpdateBatch, result: UpdateResult) -> UpdateRow:
    """Return the row of table ``updates``: rewards and groups are those of what was collected, the loss of all."""
    rows = [trajectory.row for trajectory in batch.collected]
    learned = {learned.trajectory_id for learned in result.learned}
    drawn = [d.trajectory.row for d in batch.drawn if d.trajectory_id in learned]
    groups, terms = _collected_groups(batch, result), result.terms
    return UpdateRow(
        run_id=frame.run_id,
        update=result.update,
        parent_update=frame.parent_update,
        policy_version=result.policy_version,
        new_policy_version=frame.new_policy_version,
        batch_hash=result.batch_hash,
        num_groups=len(groups),
        num_groups_kept=sum(group.kept for group in groups),
        num_trajectories=result.num_trajectories,
        num_tokens=result.num_tokens,
        num_collected_tokens=sum(row.num_prompt_tokens + row.num_sampled_tokens for row in rows),
        num_loss_tokens=result.num_loss_tokens,
        num_padding_tokens=result.num_padding_tokens,
        num_shared_tokens=result.num_shared_tokens,
        num_replayed=len(drawn),
        collected_trajectories=tuple(row.trajectory_id for row in rows),
        drawn_trajectories=tuple(drawn.trajectory_id for drawn in batch.drawn),
        drawn_sources=tuple(drawn.source for drawn in batch.drawn),
        drawn_weights=np.array([drawn.weight for drawn in batch.drawn], dtype=np.float64),
        peer_trajectories=tuple(peer.trajectory_id for peer in batch.peers()),
        epochs=result.epochs,
        optimizer_steps=len(result.taken),
        critic_steps=len(result.taken_by_critic),
        skipped_steps=result.skipped_steps,
        skipped_critic_steps=result.skipped_critic_steps,
        skipped_trajectories=result.skipped_trajectories,
        skipped_at=result.skipped_at,
        step_hashes=tuple(step.hash for step in result.steps),
        pass_tokens=terms.pass_tokens,
        learning_rate=result.learning_rate,
        critic_learning_rate=result.critic_learning_rate,
        loss=result.loss,
        policy_loss=result.policy_loss,
        kl_loss=result.kl_loss,
        entropy_loss=result.entropy_loss,
        value_loss=result.value_loss,
        losses=result.losses,
        policy_losses=result.policy_losses,
        kl_losses=result.kl_losses,
        entropy_losses=result.entropy_losses,
        value_losses=result.value_losses,
        critic_losses=result.critic_losses,
        entropies=result.entropies,
        grad_norms=result.grad_norms,
        critic_grad_norms=result.critic_grad_norms,
        grad_norm=result.grad_norm,
        clip_fraction=result.clip_fraction,
        ratio_mean=result.ratio_mean,
        approx_kl=result.approx_kl,
        reference_kl=result.reference_kl,
        entropy=result.entropy,
        overlap=result.overlap,
        explained_variance=result.explained_variance,
        logprob_difference_max=result.agreement.maximum,
        logprob_difference_mean=result.agreement.mean,
        advantage_mean=result.advantage_mean,
        advantage_std=result.advantage_std,
        reward_mean=_mean(row.reward for row in rows),
        success_rate=_mean(float(row.success) for row in rows),
        staleness_mean=result.staleness_mean,
        staleness_max=result.staleness_max,
        env_version=_joined(row.env_version for row in [*rows, *drawn]),
        reward_version=_joined(row.reward_version for row in [*rows, *drawn]),
        prompt_version=_joined(row.prompt_version for row in [*rows, *drawn]),
        schema_version=SCHEMA_VERSION,
        started_us=frame.started_us,
        finished_us=now_us(),
        generate_s=frame.seconds.get("generate", 0.0),
        environment_s=frame.seconds.get("environment", 0.0),
        store_s=frame.seconds.get("store", 0.0),
        learn_s=frame.seconds.get("learn", 0.0),
        publish_s=frame.seconds.get("publish", 0.0),
        weights_checksum=frame.weights_checksum,
        learner_settings=terms.settings,
        learner_state=terms.state,
        temperature=terms.temperature,
        total_updates=terms.total_updates,
        lost_updates=terms.lost_updates,
        reference_checksum=terms.reference_checksum,
        proximal_policy_version=terms.proximal_policy_version,
        seed=frame.seed,
        num_threads=terms.kernels.num_threads,
        deterministic=frame.deterministic,
        cpu_capability=terms.kernels.cpu_capability,
        torch_build=terms.kernels.torch_build,
    )


def group_rows(run_id: str, batch: UpdateBatch, result: UpdateResult) -> list[GroupRow]:
    """Return one row of table ``groups`` per group collected, kept or not.

    A group has its row from the update that collected it; that it was drawn again stands in ``consumptions``.
    """
    members: dict[str, list[Trajectory]] = {}
    for trajectory in batch.collected:
        members.setdefault(trajectory.row.group_id, []).append(trajectory)
    return [
        GroupRow(
            run_id=run_id,
            group_id=group.group_id,
            task_id=members[group.group_id][0].row.task_id,
            update=result.update,
            size=group.size,
            reward_mean=group.reward_mean,
            reward_std=group.reward_std,
            kept=group.kept,
            reason=group.reason,
            env_version=_joined(t.row.env_version for t in members[group.group_id]),
            reward_version=_joined(t.row.reward_version for t in members[group.group_id]),
            prompt_version=_joined(t.row.prompt_version for t in members[group.group_id]),
            policy_version=min(t.row.policy_version for t in members[group.group_id]),
            schema_version=SCHEMA_VERSION,
        )
        for group in _collected_groups(batch, result)
    ]


def learned_rows(run_id: str, batch: UpdateBatch, result: UpdateResult) -> list[LearnedTokensRow]:
    """Return one row of table ``learned_tokens`` per sequence in the batch, in its order."""
    by_id = {trajectory.row.trajectory_id: trajectory.row for trajectory in batch.trajectories}
    return [
        LearnedTokensRow(
            run_id=run_id,
            update=result.update,
            position=learned.position,
            trajectory_id=learned.trajectory_id,
            group_id=learned.group_id,
            segment=learned.segment,
            begin=learned.begin,
            weight=learned.weight,
            tokens=learned.tokens,
            loss_mask=learned.loss_mask,
            advantages=learned.advantages,
            returns=learned.returns,
            old_logprobs=learned.old_logprobs,
            new_logprobs=learned.new_logprobs,
            env_version=by_id[learned.trajectory_id].env_version,
            reward_version=by_id[learned.trajectory_id].reward_version,
            prompt_version=by_id[learned.trajectory_id].prompt_version,
            policy_version=by_id[learned.trajectory_id].policy_version,
            schema_version=SCHEMA_VERSION,
        )
        for learned in result.learned
    ]


def consumption_rows(run_id: str, batch: UpdateBatch, result: UpdateResult) -> list[ConsumptionRow]:
    """Return one row of table ``consumptions`` per trajectory that the update's loss fell on."""
    at_us, sources = now_us(), batch.sources
    weights = {learned.trajectory_id: learned.weight for learned in result.learned}
    return [
        ConsumptionRow(
            run_id=run_id,
            trajectory_id=trajectory_id,
            update=result.update,
            epochs=result.epochs,
            source=sources[trajectory_id],
            weight=weight,
            time_us=at_us,
            schema_version=SCHEMA_VERSION,
        )
        for trajectory_id, weight in weights.items()
    ]


def version_row(run_id: str, version: Version) -> VersionRow:
    """Return the row of table ``versions`` that says what ``version`` is."""
    return VersionRow(
        run_id=run_id,
        kind=version.kind,
        version=version.version,
        manifest=version.manifest,
        sources=version.sources,
        first_seen_us=now_us(),
        schema_version=SCHEMA_VERSION,
    )


def policy_version(version: int, *, checksum: str, update: int, origin: str) -> Version:
    """Return what a policy version is: its weights' checksum, the update that made it, where it began."""
    manifest = canonical_json({"checksum": checksum, "update": update, "origin": origin})
    return Version(kind="policy", version=str(version), manifest=manifest, sources="{}")


def mix_detail(member: MixedEnvironment) -> dict[str, Any]:
    """Return what the record says of one environment of a mix: by which versions its trajectories are known."""
    env_version, reward_version = member.versions
    return {
        "name": member.name,
        "env": member.environment.name,
        "env_version": env_version,
        "reward_version": reward_version,
        "weight": member.weight,
    }


def schema_version() -> Version:
    """Return what this schema version is: every table's columns."""
    columns = {name: [field.name for field in fields(table)] for name, table in TABLES.items()}
    return Version(kind="schema", version=str(SCHEMA_VERSION), manifest=canonical_json(columns), sources="{}")


def event_row(
    run_id: str, kind: str, detail: Mapping[str, Any], *, update: int, policy_version: int
) -> EventRow:
    """Return a row of table ``events``."""
    return EventRow(
        run_id=run_id,
        kind=kind,
        detail=canonical_json(dict(detail)),
        update=update,
        policy_version=policy_version,
        time_us=now_us(),
        schema_version=SCHEMA_VERSION,
    )


def _collected_groups(batch: UpdateBatch, result: UpdateResult) -> list[GroupStatistics]:
    collected = {trajectory.row.group_id for trajectory in batch.collected}
    return [group for group in result.groups if group.group_id in collected]


def _joined(versions: Iterable[str]) -> str:
    return "|".join(sorted(set(versions)))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
