"""Every metric's query against a plain recomputation over the rows themselves."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import duckdb
import numpy as np
import pytest

from hotpot.errors import UsageError
from hotpot.experience.gate.gate import Refusal, quarantine_row
from hotpot.experience.records.schema import to_table
from hotpot.metrics import CUTS, METRICS, Metric, gauge_names, metric, sql
from hotpot.testing.records import make_row, make_trajectory
from hotpot.types import (
    TABLES,
    AttemptRow,
    ConsumptionRow,
    DiscardRow,
    EvaluationRow,
    EventRow,
    GroupRow,
    LearnedTokensRow,
    MetricRow,
    Purpose,
    QuarantineRow,
    StepRow,
    Trajectory,
    TrajectoryRow,
    UpdateRow,
)

Rows = dict[str, list[Any]]


def make_rows() -> Rows:
    """Return a run of three updates: two actors, mixed versions, evaluations, odd values."""
    random = np.random.default_rng(5)
    trajectories: list[TrajectoryRow] = []
    steps: list[StepRow] = []
    for issue in range(12):
        for sample in range(3):
            purpose = [Purpose.TRAINING, Purpose.TRAINING, Purpose.EVALUATION, Purpose.EVALUATION_GREEDY][
                issue % 4
            ]
            made = make_trajectory(
                issue=issue, sample=0 if issue == 4 else sample, reward=float(random.integers(0, 2)), purpose=purpose,
                policy_version=1 + issue // 4, num_steps=int(random.integers(1, 4)), attempt=sample if issue == 4 else 0,
                evaluation=None if purpose == Purpose.TRAINING else issue // 4, actor_id=f"actor-{sample % 2}",
            )  # fmt: skip
            if issue == 4:  # three trajectories of one group that sampled the same
                first = make_trajectory(issue=4, policy_version=2, num_steps=2)
                made = dataclasses.replace(
                    made,
                    row=dataclasses.replace(made.row, num_steps=2),
                    steps=tuple(
                        dataclasses.replace(step, trajectory_id=made.row.trajectory_id)
                        for step in first.steps
                    ),
                )
            env_version = "env@2+b" if issue > 6 else "other@1+a" if issue in {3, 5} else "env@1+a"
            row = dataclasses.replace(
                made.row, env_version=env_version, tool_errors=int(random.integers(0, 2)),
                end_reason=("max_context" if issue == 8 else "max_steps") if random.random() < 0.3 else "answered",
            )  # fmt: skip
            trajectories.append(row)
            steps += [
                dataclasses.replace(
                    step, env_version=env_version, generate_s=float(random.random()), queue_s=float(random.random()),
                    environment_s=float(random.random()), reused_tokens=int(random.integers(0, step.context_tokens + 1)),
                    temperature=0.0 if issue == 9 and step.step == 0 else 1.0,
                    num_preemptions=int(random.integers(0, 3)),
                    **_change(issue, sample, step.step),
                )
                for step in made.steps
            ]  # fmt: skip
    return {
        "trajectories": trajectories,
        "steps": steps,
        "consumptions": [_consumption(*use) for use in USES],
        "learned_tokens": [_learned(random, *use, position) for use in USES for position in range(2)],
        "attempts": _attempts(trajectories),
        "discards": [
            make_row(DiscardRow, trajectory_id=name, reason=reason, update=update, staleness=update, policy_version=update)
            for name, reason, update in DISCARDS
        ],
        "updates": [
            dataclasses.replace(_update(random, number), collected_trajectories=COLLECTED[number]) for number in range(1, 4)
        ],
        "evaluations": [_evaluation(random, number) for number in range(6)],
        "quarantine": _refused(trajectories),
        "groups": [make_row(GroupRow, kept=number % 3 == 0, update=1 + number % 2) for number in range(7)],
        "events": [
            *(make_row(EventRow, kind=kind, update=number) for kind, number in EVENTS),
            *(make_row(EventRow, kind=kind, update=number, detail=detail) for kind, number, detail in FOUND),
        ],
        "metrics": [_gauge(random, name, number) for number in range(4) for name in sorted(gauge_names())],
    }  # fmt: skip


COLLECTED = {1: ("0.0.0", "1.0.0", "5.1.0"), 2: ("4.0.0", "4.0.1", "5.0.0", "9.2.0"), 3: ()}
"""What each update collected: 1 from issues 0 to 5, 2 from 4 to 9."""

DISCARDS = (
    ("0.1.0", "stale", 2),
    ("1.2.0", "surplus", 2),
    ("8.0.0", "stale", 3),
    ("77.0.0", "overflow_oldest", 1),
)
"""(trajectory, reason, update); the last one's trajectory was deleted."""


def _attempts(trajectories: list[TrajectoryRow]) -> list[AttemptRow]:
    """Return an attempt for each trajectory, and such as brought none: cut, given up after a try, interrupted, leased."""
    ended = [(row.attempt_id, row.group_id, row.purpose, "finished", "") for row in trajectories]
    ended += [
        ("0.7.0", "g0", "training", "dropped", "cut: its group has enough"),
        ("1.7.0", "g1", "training", "failed", "it broke"),
        ("1.7.1", "g1", "training", "dropped", "gave up after 2 tries"),
        ("1.8.0", "g1", "training", "failed", "it broke"),
        ("1.8.1", "g1", "training", "leased", ""),
        ("33.0.0", "g33", "training", "dropped", "owner_died"),
        ("v0:2.7.0", "v0:g2", "evaluation", "dropped", "owner_died"),
    ]
    return [
        make_row(
            AttemptRow, attempt_id=name, episode_id=name.rpartition(".")[0], group_id=group, purpose=purpose, state=state,
            reason=reason,
        )
        for name, group, purpose, state, reason in ended
    ]  # fmt: skip


def _refused(trajectories: list[TrajectoryRow]) -> list[QuarantineRow]:
    found = []
    for number, row in enumerate(trajectories[:7]):
        made = Trajectory(row=row, steps=())
        record: Any = {"row": {"env_version": 3}, "schema_version": "?"} if number == 6 else made
        reason = ["rewards", "tokens", "breaker_open"][number % 3]
        found.append(
            quarantine_row(
                record, Refusal(reason=reason, detail="d"), run_id="run", quarantine_id=str(number), time_us=1,
                producer="other" if number == 6 else None,
            )
        )  # fmt: skip
    return found


def _change(issue: int, sample: int, step: int) -> dict[str, Any]:
    """Return what the context limit did: cut one, handed over notes, some of which were lost."""
    changes = {1: ("truncated", 9), 4: ("handover", 0), 5: ("handover", 0)}
    change, dropped = changes.get(issue, ("none", 0)) if step == 0 and sample else ("none", 0)
    if issue in {4, 5} and step == 1:
        change, dropped = (("segmented", 30), ("fallback", 4))[sample % 2]
    return {"context_change": change, "context_dropped_tokens": dropped}


FOUND = (
    ("beats", 1, '{"parts":[{"silent_s":1.5},{"silent_s":0.0}]}'),
    ("beats", 3, '{"parts":[{"silent_s":0.25},{"silent_s":7.75}]}'),
    ("beats", 3, '{"parts":[]}'),
    ("part_dead", 2, '{"part":"learner"}'),
    ("part_dead", 2, '{"part":"actor-1"}'),
    ("actor_replaced", 2, '{"actor_id":"actor-1"}'),
    ("environment_breaker_opened", 1, '{"env_version":"env@2+b"}'),
    ("environment_breaker_opened", 2, '{"env_version":"env@2+b"}'),
    ("environment_breaker_opened", 2, '{"env_version":"other@1+a"}'),
    ("watchdog_ended", 9, '{"culprit":"store"}'),
)
"""Kind, update and detail of what supervision tells."""

EVENTS = (("publish", 1), ("non_finite", 1), ("exploding", 2), ("non_finite", 2), ("non_finite", 3))

USES = ((1, "t1", "fresh"), (2, "t1", "hot"), (2, "t2", "fresh"), (3, "t1", "hot"), (3, "t0", "cold"))
"""(update, trajectory, source) of every use; each of two sequences."""


def _consumption(update: int, trajectory_id: str, source: str) -> ConsumptionRow:
    return make_row(
        ConsumptionRow, update=update, trajectory_id=trajectory_id, source=source, weight=_weight(update)
    )


def _learned(
    random: np.random.Generator, update: int, trajectory_id: str, _source: str, position: int
) -> LearnedTokensRow:
    return make_row(
        LearnedTokensRow, update=update, trajectory_id=trajectory_id, position=position, weight=_weight(update),
        policy_version=int(trajectory_id[1]), env_version="env@1+a", advantages=random.random(3).astype(np.float32),
    )  # fmt: skip


def _weight(update: int) -> float:
    return 0.25 * update


def _update(random: np.random.Generator, number: int) -> UpdateRow:
    drawn = {
        column.name: float(random.random())
        for column in dataclasses.fields(UpdateRow)
        if column.type is float and column.name not in {"explained_variance"}
    }
    norms = random.random(number)
    return make_row(
        UpdateRow, **drawn, update=number, policy_version=number, grad_norms=norms, losses=norms,
        reference_kl=None if number == 2 else 0.5 * number, num_loss_tokens=10 * number, num_tokens=30 * number,
        num_collected_tokens=50 * number, num_trajectories=2, num_replayed=number - 1,
        num_padding_tokens=7 * number, optimizer_steps=0 if number == 3 else number, skipped_steps=4 - number,
        staleness_max=number, epochs=number, num_groups=5, num_groups_kept=number, started_us=number * 3_000_000,
        finished_us=number * 3_000_000 + number * 400_000,
    )  # fmt: skip


def _evaluation(random: np.random.Generator, number: int) -> EvaluationRow:
    return make_row(
        EvaluationRow, evaluation=number, update=number, purpose=["evaluation", "evaluation_greedy"][number % 2],
        split="train" if number == 4 else "holdout", num_tasks=10 + number, num_failed=number, policy_version=number,
        success_rate=float(random.random()), reward_mean=float(random.random()), steps_mean=float(random.random()),
    )  # fmt: skip


def _gauge(random: np.random.Generator, name: str, number: int) -> MetricRow:
    return make_row(MetricRow, name=name, value=float(random.random()), update=number, policy_version=number)


@pytest.fixture(scope="module")
def rows() -> Rows:
    return make_rows()


@pytest.fixture(scope="module")
def database(rows: Rows) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for name, found in rows.items():
        connection.register(name, to_table(name, found))
    return connection


def training(found: Sequence[Any]) -> list[Any]:
    return [row for row in found if row.purpose == "training"]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def wall_s(found: Sequence[Any]) -> float:
    return (max(row.finished_us for row in found) - min(row.started_us for row in found)) / 1e6


def distinct_share(rows: Rows, what: Callable[[list[StepRow]], object]) -> float:
    by_trajectory: dict[str, list[StepRow]] = {}
    for step in training(rows["steps"]):
        by_trajectory.setdefault(step.trajectory_id, []).append(step)
    ordered = [sorted(found, key=lambda step: step.step) for found in by_trajectory.values()]
    return len({(found[0].group_id, what(found)) for found in ordered}) / len(ordered)


def weighted(rows: Rows, column: str, weight: str) -> float:
    used = [row for row in rows["updates"] if row.optimizer_steps > 0 and getattr(row, column) is not None]
    total = sum(getattr(row, column) * getattr(row, weight) for row in used)
    return total / sum(getattr(row, weight) for row in used)


def measured(rows: Rows, column: str, purpose: str) -> float:
    used = [row for row in rows["evaluations"] if row.purpose == purpose and row.split == "holdout"]
    return sum(getattr(row, column) * row.num_tasks for row in used) / sum(row.num_tasks for row in used)


def gap(rows: Rows, column: str) -> float:
    found = rows["trajectories"]
    held_out = [
        getattr(row, column) for row in found if row.purpose == "evaluation" and row.split == "holdout"
    ]
    return mean([getattr(row, column) for row in training(found)]) - mean(held_out)


def hit_share(found: Sequence[StepRow]) -> float:
    return sum(s.reused_tokens for s in found) / sum(s.context_tokens for s in found)


def of_gauge(rows: Rows, name: str) -> list[float]:
    return [row.value for row in rows["metrics"] if row.name == name]


def update_s(rows: Rows) -> float:
    return sum((row.finished_us - row.started_us) / 1e6 for row in rows["updates"])


def of_updates(rows: Rows, column: str) -> float:
    return sum(getattr(row, column) for row in rows["updates"])


def steps_of(rows: Rows) -> dict[str, list[StepRow]]:
    found: dict[str, list[StepRow]] = {}
    for step in sorted(training(rows["steps"]), key=lambda step: step.step):
        found.setdefault(step.trajectory_id, []).append(step)
    return found


def context_limit_share(rows: Rows) -> float:
    met = {name for name, steps in steps_of(rows).items() if any(s.context_change != "none" for s in steps)}
    return mean(
        [t.trajectory_id in met or t.end_reason == "max_context" for t in training(rows["trajectories"])]
    )


def windows_mean(rows: Rows) -> float:
    return mean([1 + sum(s.context_dropped_tokens > 0 for s in steps) for steps in steps_of(rows).values()])


def notes_lost_share(rows: Rows) -> float:
    lost = []
    for steps in steps_of(rows).values():
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            if step.context_change == "handover":
                lost.append(after is None or after.context_change != "segmented")
    return mean(lost)


def length_bias(rows: Rows, column: str) -> float:
    """Return the ratio of means over updates 1 and 2: what they collected, and what was issued about then."""
    found = {row.trajectory_id: row for row in training(rows["trajectories"])}
    collected: list[float] = [getattr(found[name], column) for names in COLLECTED.values() for name in names]
    about: list[float] = [
        getattr(row, column)
        for first, last in ((0, 5), (4, 9))
        for row in found.values()
        if first <= int(row.group_id[1:]) <= last
    ]
    return mean(collected) / mean(about)


def staleness(rows: Rows) -> list[int]:
    """Return the staleness of each sampled token that an update collected."""
    return [
        update - version
        for update, names in COLLECTED.items()
        for step in rows["steps"]
        if step.trajectory_id in names
        for version, length in zip(step.span_policy_version, step.span_policy_length, strict=True)
        for _ in range(length)
    ]


def ended_episodes(rows: Rows) -> int:
    """Return the training episodes that ended: those finished, and three without a trajectory."""
    return len({row.episode_id for row in training(rows["trajectories"])}) + 3


PLAIN: dict[str, Callable[[Rows], float]] = {
    "rollout/trajectories_per_s": lambda r: len(training(r["trajectories"])) / wall_s(training(r["trajectories"])),
    "rollout/sampled_tokens_per_s": lambda r: sum(t.num_sampled_tokens for t in training(r["trajectories"]))
    / wall_s(training(r["trajectories"])),
    "rollout/generate_s_per_step": lambda r: mean([s.generate_s for s in r["steps"]]),
    "rollout/queue_s_per_step": lambda r: mean([s.queue_s for s in r["steps"]]),
    "rollout/environment_s_per_step": lambda r: mean([s.environment_s for s in r["steps"]]),
    "rollout/steps_mean": lambda r: mean([t.num_steps for t in training(r["trajectories"])]),
    "rollout/sampled_tokens_mean": lambda r: mean([t.num_sampled_tokens for t in training(r["trajectories"])]),
    "rollout/tokens_mean": lambda r: mean(
        [t.num_prompt_tokens + t.num_sampled_tokens for t in training(r["trajectories"])]
    ),
    "rollout/cut_share": lambda r: mean([t.end_reason != "answered" for t in training(r["trajectories"])]),
    "rollout/tool_error_share": lambda r: sum(t.tool_errors for t in training(r["trajectories"]))
    / sum(t.num_steps for t in training(r["trajectories"])),
    "rollout/diversity_sequences": lambda r: distinct_share(
        r, lambda steps: tuple(tuple(s.sampled_tokens) for s in steps)
    ),
    "rollout/diversity_tool_paths": lambda r: distinct_share(r, lambda steps: tuple(s.tool_name for s in steps)),
    "rollout/diversity_last_steps": lambda r: distinct_share(r, lambda steps: tuple(steps[-1].sampled_tokens)),
    "rollout/sampled_surprise": lambda r: -sum(float(s.behaviour_logprobs.sum()) for s in training(r["steps"]))
    / sum(len(s.sampled_tokens) for s in training(r["steps"])),
    "rollout/sampling_sets": lambda r: len({s.temperature for s in training(r["steps"])}),
    "rollout/sampled_steps": lambda r: len(r["steps"]),
    "rollout/greedy_share": lambda r: mean([s.temperature == 0 for s in training(r["steps"])]),
    "rollout/precisions": lambda r: 1,
    **{
        name: lambda r, name=name: max(of_gauge(r, name))  # type: ignore[misc]
        for name in (
            "rollout/sampling_overrides", "rollout/engine_report_differences", "engine/incremental_difference_max",
        )
    },
    "engine/prefix_hit_share": lambda r: hit_share(r["steps"]),
    "engine/prefill_tokens": lambda r: sum(s.context_tokens - s.reused_tokens for s in r["steps"]),
    "engine/prefill_tokens_per_step": lambda r: mean([s.context_tokens - s.reused_tokens for s in r["steps"]]),
    "rollout/reward_mean": lambda r: mean([t.reward for t in training(r["trajectories"])]),
    "rollout/reward_variance": lambda r: float(np.var([t.reward for t in training(r["trajectories"])])),
    "rollout/success_rate": lambda r: mean([t.success for t in training(r["trajectories"])]),
    "rollout/context_limit_share": context_limit_share,
    "rollout/context_dropped_tokens": lambda r: mean(
        [s.context_dropped_tokens for s in training(r["steps"]) if s.context_dropped_tokens]
    ),
    "rollout/windows_mean": windows_mean,
    "rollout/notes_lost_share": notes_lost_share,
    "rollout/preemptions_per_step": lambda r: mean([s.num_preemptions for s in r["steps"]]),
    "rollout/segments_mean": lambda r: mean([t.num_segments for t in training(r["trajectories"])]),
    "gate/refused_share": lambda r: 7 / (7 + len(r["trajectories"])),
    "gate/refused_records": lambda r: 7,
    "gate/held_share": lambda r: 2 / 7,
    "learn/loss": lambda r: weighted(r, "loss", "optimizer_steps"),
    "learn/policy_loss": lambda r: weighted(r, "policy_loss", "optimizer_steps"),
    "learn/kl_loss": lambda r: weighted(r, "kl_loss", "optimizer_steps"),
    "learn/entropy_loss": lambda r: weighted(r, "entropy_loss", "optimizer_steps"),
    "learn/grad_norm": lambda r: weighted(r, "grad_norm", "optimizer_steps"),
    "learn/grad_norm_max": lambda r: max(float(u.grad_norms.max()) for u in r["updates"]),
    **{
        f"learn/{column}": lambda r, column=column: weighted(r, column, "num_loss_tokens")  # type: ignore[misc]
        for column in (
            "approx_kl", "reference_kl", "overlap", "ratio_mean", "clip_fraction", "entropy", "advantage_mean",
            "advantage_std", "logprob_difference_mean", "staleness_mean",
        )
    },
    "learn/logprob_difference_max": lambda r: max(u.logprob_difference_max for u in r["updates"]),
    "learn/staleness_max": lambda r: 3,
    "learn/skipped_share": lambda r: of_updates(r, "skipped_steps")
    / (of_updates(r, "skipped_steps") + of_updates(r, "optimizer_steps")),
    "learn/skipped_steps": lambda r: of_updates(r, "skipped_steps"),
    "learn/non_finite_steps": lambda r: 3,
    "learn/exploding_steps": lambda r: 1,
    "learn/no_signal_share": lambda r: mean([not g.kept for g in r["groups"]]),
    "learn/kept_group_share": lambda r: of_updates(r, "num_groups_kept") / of_updates(r, "num_groups"),
    "learn/updates_per_s": lambda r: len(r["updates"]) / wall_s(r["updates"]),
    "learn/tokens_per_s": lambda r: sum(u.num_tokens * u.epochs for u in r["updates"]) / of_updates(r, "learn_s"),
    "learn/padding_share": lambda r: of_updates(r, "num_padding_tokens")
    / (of_updates(r, "num_padding_tokens") + of_updates(r, "num_tokens")),
    "replay/share": lambda r: (0 + 1 + 2) / 6,
    "replay/weight_mean": lambda r: mean([_weight(2), _weight(3), _weight(3)]),
    "replay/staleness_mean": lambda r: mean([2 - 1, 3 - 1, 3 - 0]),
    "replay/uses_mean": lambda r: 3 / 2,
    "queue/depth": lambda r: mean(of_gauge(r, "queue/depth")),
    "queue/late_batches": lambda r: max(of_gauge(r, "queue/late_batches")),
    "queue/skipped_batches": lambda r: max(of_gauge(r, "queue/skipped_batches")),
    "queue/length_bias_steps": lambda r: length_bias(r, "num_steps"),
    "queue/length_bias_tokens": lambda r: length_bias(r, "num_sampled_tokens"),
    "queue/unfinished_share": lambda r: 3 / ended_episodes(r),
    "queue/cut_share": lambda r: 1 / ended_episodes(r),
    "queue/staleness_mean": lambda r: mean(staleness(r)),
    "queue/staleness_max": lambda r: max(staleness(r)),
    "queue/collected_tokens": lambda r: len(staleness(r)),
    "queue/discards": lambda r: 4,
    "queue/discard_share": lambda r: 3 / len(training(r["trajectories"])),
    "evaluation/success_rate": lambda r: measured(r, "success_rate", "evaluation"),
    "evaluation/success_rate_greedy": lambda r: measured(r, "success_rate", "evaluation_greedy"),
    "evaluation/reward_mean": lambda r: measured(r, "reward_mean", "evaluation"),
    "evaluation/reward_mean_greedy": lambda r: measured(r, "reward_mean", "evaluation_greedy"),
    "evaluation/steps_mean": lambda r: measured(r, "steps_mean", "evaluation"),
    "evaluation/failed_share": lambda r: sum(e.num_failed for e in r["evaluations"])
    / sum(e.num_failed + e.num_tasks for e in r["evaluations"]),
    "evaluation/success_gap": lambda r: gap(r, "success"),
    "evaluation/reward_gap": lambda r: gap(r, "reward"),
    **{
        f"system/{name}": lambda r, name=name: mean(of_gauge(r, f"system/{name}"))  # type: ignore[misc]
        for name in (
            "processor_idle_share", "num_threads", "gpu_utilisation", "engine_queue_depth", "experience_backlog",
        )
    },
    **{
        f"system/{name}": lambda r, name=name: max(of_gauge(r, f"system/{name}"))  # type: ignore[misc]
        for name in (
            "memory_rss_bytes", "gpu_memory_bytes", "failed_attempts", "dropped_episodes", "quarantined_trajectories",
            "close_failures", "redactions",
        )
    },
    "system/actor_replacements": lambda r: 1,
    "system/dead_parts": lambda r: 2,
    "system/environment_breaker_openings": lambda r: 3,
    "system/watchdog_endings": lambda r: 1,
    "system/longest_silence_s": lambda r: 7.75,
    "system/publish_s": lambda r: mean([u.publish_s for u in r["updates"]]),
    "system/update_s": lambda r: update_s(r) / len(r["updates"]),
    "system/tokens_per_s": lambda r: of_updates(r, "num_collected_tokens") / update_s(r),
    "system/learner_idle_share": lambda r: 1 - of_updates(r, "learn_s") / update_s(r),
    "system/generate_share": lambda r: of_updates(r, "generate_s") / update_s(r),
    "system/environment_share": lambda r: of_updates(r, "environment_s") / update_s(r),
    "system/store_share": lambda r: of_updates(r, "store_s") / update_s(r),
    "system/learn_share": lambda r: of_updates(r, "learn_s") / update_s(r),
}  # fmt: skip
NULL_HERE = {"learn/explained_variance"}


@pytest.mark.parametrize("found", METRICS.values(), ids=lambda found: found.name)
def test_value_is_the_plain_recomputation(
    found: Metric, rows: Rows, database: duckdb.DuckDBPyConnection
) -> None:
    ((value,),) = database.execute(sql(found)).fetchall()
    if found.name in NULL_HERE:
        assert value is None
        return
    expected = PLAIN[found.name](rows)
    assert value == pytest.approx(expected, rel=1e-6)
    assert math.isfinite(value)


@pytest.mark.parametrize("found", METRICS.values(), ids=lambda found: found.name)
def test_every_cut_partitions_and_agrees_with_where(
    found: Metric, database: duckdb.DuckDBPyConnection
) -> None:
    for cut in found.cuts:
        for key, value in database.execute(sql(found, by=[cut])).fetchall():
            where = f"{cut} = '{key}'" if isinstance(key, str) else f"{cut} = {key}"
            ((alone,),) = database.execute(sql(found, where=where)).fetchall()
            assert value == alone or value == pytest.approx(alone)


@pytest.mark.parametrize("found", METRICS.values(), ids=lambda found: found.name)
def test_every_metric_is_cut_by_policy_and_environment_version_and_documented(found: Metric) -> None:
    assert {"policy_version", "env_version"} <= set(found.cuts)
    assert found.table in TABLES
    assert all((found.unit, found.meaning, found.healthy, found.remedy))


def test_openings_are_told_by_the_version_that_fails_and_silence_by_update(
    database: duckdb.DuckDBPyConnection,
) -> None:
    openings = database.execute(
        sql(metric("system/environment_breaker_openings"), by=["env_version"])
    ).fetchall()
    assert openings == [("env@2+b", 2), ("other@1+a", 1)]
    silences = database.execute(sql(metric("system/longest_silence_s"), by=["update"])).fetchall()
    assert silences == [(1, 1.5), (3, 7.75)]


def test_refusals_are_told_by_producer_reason_and_version(database: duckdb.DuckDBPyConnection) -> None:
    counts = database.execute(sql(metric("gate/refused_records"), by=["producer", "reason"])).fetchall()
    assert counts == [
        ("actor-0", "breaker_open", 2), ("actor-0", "rewards", 2), ("actor-1", "tokens", 2), ("other", "rewards", 1),
    ]  # fmt: skip
    versions = database.execute(sql(metric("gate/refused_records"), by=["env_version", "policy_version"]))
    assert versions.fetchall() == [("3", -1, 1), ("env@1+a", 1, 6)]


def test_prefix_hits_are_told_by_environment_and_step(
    rows: Rows, database: duckdb.DuckDBPyConnection
) -> None:
    found = database.execute(sql(metric("engine/prefix_hit_share"), by=["env", "step"])).fetchall()
    assert [(env, step) for env, step, _ in found] == [
        ("env", 0), ("env", 1), ("env", 2), ("other", 0), ("other", 1), ("other", 2)
    ]  # fmt: skip
    for env, step, value in found:
        chosen = [s for s in rows["steps"] if s.env_version.split("@")[0] == env and s.step == step]
        assert value == pytest.approx(hit_share(chosen))
    assert len({round(value, 6) for _, _, value in found}) == 6


def test_two_cuts_at_once(rows: Rows, database: duckdb.DuckDBPyConnection) -> None:
    cut = database.execute(sql(metric("rollout/reward_mean"), by=["env_version", "actor_id"])).fetchall()
    found = training(rows["trajectories"])
    for env_version, actor_id, value in cut:
        chosen = [t.reward for t in found if (t.env_version, t.actor_id) == (env_version, actor_id)]
        assert value == pytest.approx(mean(chosen))
    assert len(cut) == len({(t.env_version, t.actor_id) for t in found})
    assert cut == sorted(cut)


def test_a_metric_over_nothing_is_null_not_zero(database: duckdb.DuckDBPyConnection) -> None:
    for name in ("rollout/success_rate", "learn/loss", "evaluation/success_gap", "system/memory_rss_bytes"):
        ((value,),) = database.execute(sql(metric(name), where="policy_version = 99")).fetchall()
        assert value is None


def test_where_cannot_widen_the_mask(database: duckdb.DuckDBPyConnection) -> None:
    found = metric("rollout/steps_mean")
    ((narrow,),) = database.execute(sql(found)).fetchall()
    ((same,),) = database.execute(sql(found, where="false OR true")).fetchall()
    assert narrow == same


def test_refusals_name_what_would_work() -> None:
    with pytest.raises(UsageError, match="nearest: learn/clip_fraction"):
        metric("clip_fracton")
    with pytest.raises(UsageError, match=r"cannot be cut by 'actor_id'.*policy_version"):
        sql(metric("learn/loss"), by=["actor_id"])
    with pytest.raises(UsageError, match="cannot be cut by 'purpose'"):
        sql(metric("evaluation/success_gap"), by=["purpose"])
    assert set(metric("rollout/steps_mean").cuts) == set(CUTS) - {"update"}
    assert "temperature" in metric("rollout/sampled_steps").cuts
