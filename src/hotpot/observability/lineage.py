"""Which versions a run used, when, and what became of one trajectory: everything asked of the lake.

Owns the questions and the records that answer them; what *differs* between two runs is :mod:`changes`. Updates are
those that consumed trajectories of the version; a version that only evaluation used has none.
"""

from dataclasses import dataclass, replace
from typing import Any

from hotpot.errors import UsageError
from hotpot.metrics import quoted
from hotpot.observability.queries import SqlReader, rows
from hotpot.observability.version_changes import KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionUse:
    """One version as a run used it.

    ``first_update``/``last_update`` are the updates that consumed it (None: none did). ``reward_mean`` is over the
    training trajectories under it, ``reward_before`` over those under the version of its kind used before it.
    """

    kind: str
    version: str
    num_steps: int
    num_trajectories: int
    first_update: int | None
    last_update: int | None
    first_us: int
    last_us: int
    reward_before: float | None
    reward_mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUse:
    """One policy version that sampled tokens of a trajectory, and the update that made it (None: the starting model).

    ``origin`` is the run whose update it was, or the model or checkpoint folder that was taken up as this version.
    """

    policy_version: int
    checksum: str
    num_tokens: int
    made_by_update: int | None
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """One update that used a trajectory, and the policy version that came of it."""

    update: int
    epochs: int
    source: str
    policy_version: int | None
    new_policy_version: int | None
    num_loss_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarding:
    """Why a trajectory was not learned from as fresh, during which update, and how stale it was then."""

    reason: str
    update: int
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """One trajectory of a family of forks; the root of the tree has neither parent nor fork step, and depth 0."""

    trajectory_id: str
    parent_trajectory_id: str | None
    fork_step: int | None
    depth: int
    num_steps: int
    reward: float
    success: bool
    updates: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryLineage:
    """Where a trajectory came from and what consumed it, oldest first.

    ``family`` is the whole tree it belongs to, each parent before its forks; empty where it is no fork and has none.
    """

    trajectory_id: str
    parent_trajectory_id: str | None
    fork_step: int | None
    task_id: str
    purpose: str
    reward: float
    success: bool
    env_version: str
    reward_version: str
    prompt_version: str
    policies: tuple[PolicyUse, ...]
    consumptions: tuple[Consumption, ...]
    discarded: Discarding | None
    family: tuple[Relative, ...]


def version_uses(reader: SqlReader) -> list[VersionUse]:
    """Return every version of each kind that the run's steps carry, kind by kind in order of first use."""
    found: list[VersionUse] = []
    for kind, column in KINDS.items():
        before: float | None = None
        for row in rows(reader, _uses_query(column)):
            use = VersionUse(kind=kind, reward_before=None, **row)
            found.append(replace(use, reward_before=before))
            # Versions that only evaluation used say nothing of training's reward.
            before = use.reward_mean if use.reward_mean is not None else before
    return found


def trajectory_lineage(reader: SqlReader, trajectory_id: str) -> TrajectoryLineage:
    """Return the chain of one trajectory: the policy versions that sampled it, the updates that consumed it.

    Raises
    ------
    UsageError: the run has no such trajectory.
    """
    wanted = quoted(trajectory_id)
    found = rows(
        reader,
        "SELECT trajectory_id, parent_trajectory_id, fork_step, task_id, purpose, reward, success, env_version, reward_version, prompt_version "
        f"FROM trajectories WHERE trajectory_id = {wanted}",
    )
    if not found:
        raise UsageError(unknown_trajectory(reader, trajectory_id))
    policies = rows(
        reader,
        f"""
        WITH spans AS (
          SELECT unnest(span_policy_version) AS policy_version, unnest(span_policy_length) AS num_tokens
          FROM steps WHERE trajectory_id = {wanted}),
        checksums AS (SELECT policy_version, any_value(policy_checksum) AS checksum FROM steps GROUP BY 1)
        SELECT policy_version, coalesce(any_value(checksum), '') AS checksum,
          sum(num_tokens)::BIGINT AS num_tokens,
          nullif(coalesce(any_value(update), any_value(TRY_CAST(manifest AS JSON)->>'$.update')::BIGINT), 0) AS made_by_update,
          coalesce(any_value(TRY_CAST(manifest AS JSON)->>'$.origin'), '') AS origin
        FROM spans LEFT JOIN checksums USING (policy_version)
          LEFT JOIN (SELECT new_policy_version AS policy_version, update FROM updates) USING (policy_version)
          LEFT JOIN (SELECT TRY_CAST(version AS BIGINT) AS policy_version, manifest FROM versions
            WHERE kind = 'policy') USING (policy_version)
        GROUP BY policy_version ORDER BY policy_version""",
    )
    consumptions = rows(
        reader,
        f"""
        SELECT c.update, c.epochs, c.source, u.policy_version, u.new_policy_version,
          coalesce((SELECT sum(list_sum(l.loss_mask)) FROM learned_tokens l
            WHERE l.update = c.update AND l.trajectory_id = {wanted}), 0)::BIGINT AS num_loss_tokens
        FROM consumptions c LEFT JOIN updates u ON u.update = c.update
        WHERE c.trajectory_id = {wanted} ORDER BY c.update""",
    )
    discarded = rows(reader, f"SELECT reason, update, staleness FROM discards WHERE trajectory_id = {wanted}")
    return TrajectoryLineage(
        **found[0],
        policies=tuple(PolicyUse(**row) for row in policies),
        consumptions=tuple(Consumption(**row) for row in consumptions),
        discarded=Discarding(**discarded[0]) if discarded else None,
        family=tuple(family(reader, trajectory_id)),
    )


def family(reader: SqlReader, trajectory_id: str) -> list[Relative]:
    """Return the tree of forks that a trajectory belongs to, depth first; empty where it is alone in it."""
    found = rows(
        reader,
        f"""
        WITH RECURSIVE forks AS (
          SELECT trajectory_id, parent_trajectory_id, fork_step, num_steps, reward, success FROM trajectories),
        up AS (
          SELECT trajectory_id, parent_trajectory_id FROM forks WHERE trajectory_id = {quoted(trajectory_id)}
          UNION SELECT f.trajectory_id, f.parent_trajectory_id
          FROM forks f JOIN up ON f.trajectory_id = up.parent_trajectory_id),
        down AS (
          SELECT f.*, 0 AS depth, [f.trajectory_id] AS path FROM forks f JOIN up USING (trajectory_id)
          WHERE f.parent_trajectory_id IS NULL OR f.parent_trajectory_id NOT IN (SELECT trajectory_id FROM forks)
          UNION ALL SELECT f.*, down.depth + 1, list_append(down.path, f.trajectory_id)
          FROM forks f JOIN down ON f.parent_trajectory_id = down.trajectory_id
          WHERE NOT list_contains(down.path, f.trajectory_id)),
        used AS (
          SELECT trajectory_id, list("update" ORDER BY "update") AS updates FROM consumptions GROUP BY trajectory_id)
        SELECT down.* EXCLUDE (path), coalesce(used.updates, []) AS updates
        FROM down LEFT JOIN used USING (trajectory_id) ORDER BY down.path""",
    )
    relatives = [Relative(**{**row, "updates": tuple(row["updates"])}) for row in found]
    return relatives if len(relatives) > 1 or any(one.parent_trajectory_id for one in relatives) else []


def unknown_trajectory(reader: SqlReader, trajectory_id: str) -> str:
    """Return the message for an id the run doesn't have: that it was deleted, or some that are like it."""
    gone = rows(
        reader,
        "SELECT told->>'$.who' AS who, told->>'$.reason' AS reason, make_timestamp(time_us)::VARCHAR AS at "
        "FROM (SELECT TRY_CAST(detail AS JSON) AS told, time_us FROM events WHERE kind = 'deleted') "
        f"WHERE told->>'$.trajectory_id' = {quoted(trajectory_id)} ORDER BY time_us",
    )
    if gone:
        (last,) = gone[-1:]
        return (
            f"trajectory {trajectory_id!r} was deleted at {last['at']} UTC by {last['who']}: {last['reason']}"
        )
    some: list[Any] = [
        row["trajectory_id"]
        for row in rows(
            reader,
            "SELECT trajectory_id FROM trajectories "
            f"ORDER BY levenshtein(trajectory_id, {quoted(trajectory_id)}), trajectory_id LIMIT 3",
        )
    ]
    near = f"nearest: {', '.join(some)}" if some else "it has none yet"
    return f"the run has no trajectory {trajectory_id!r}; {near}"


def _uses_query(column: str) -> str:
    return f"""
        WITH used AS (
          SELECT trajectory_id, min(update) AS first_update, max(update) AS last_update
          FROM consumptions GROUP BY trajectory_id),
        rewards AS (
          SELECT {column}, avg(reward) AS reward_mean FROM trajectories WHERE purpose = 'training' GROUP BY 1)
        SELECT s.{column}::VARCHAR AS version, count(*) AS num_steps,
          count(DISTINCT s.trajectory_id) AS num_trajectories, min(used.first_update) AS first_update,
          max(used.last_update) AS last_update, min(s.started_us) AS first_us, max(s.finished_us) AS last_us,
          any_value(rewards.reward_mean) AS reward_mean
        FROM steps s LEFT JOIN used USING (trajectory_id) LEFT JOIN rewards ON rewards.{column} = s.{column}
        GROUP BY s.{column} ORDER BY first_us, s.{column}"""
