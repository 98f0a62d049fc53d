import io
import json

import pytest
from rich.console import Console

from hotpot.config import Recipe
from hotpot.config.load import build_recipe
from hotpot.config.plan import make_plan, plan_table
from hotpot.config.sections import QueueSection
from hotpot.errors import RecipeError


def recipe(*overrides: str) -> Recipe:
    return build_recipe({}, overrides, origin="test")


def test_the_chain_from_tasks_to_optimiser_steps() -> None:
    plan = make_plan(
        recipe(
            "rollout.tasks_per_batch=6", "rollout.samples_per_task=5", "rollout.max_steps=3", "rollout.max_step_tokens=10",
            "rollout.max_context_tokens=100", "engine.max_concurrency=8", "learner.epochs=2", "learner.minibatches=4",
            "learner.micro_batch_tokens=350", "topology.updates=7",
        )
    )  # fmt: skip
    assert plan.episodes_per_update == 30
    assert plan.generation_waves == 4
    assert plan.max_sampled_tokens_per_update == 30 * 30
    assert plan.max_context_tokens_per_update == 30 * 100
    assert plan.cache_tokens == 800
    assert plan.optimizer_steps_per_update == 8
    assert plan.max_episodes_per_optimizer_step == 8
    assert plan.min_episodes_per_micro_batch == 3
    assert (plan.total_episodes, plan.total_optimizer_steps) == (210, 56)
    assert plan.max_total_sampled_tokens == 7 * 900


def test_replayed_trajectories_come_on_top_of_the_episodes() -> None:
    plan = make_plan(recipe("replay.share=0.3", "rollout.tasks_per_batch=4", "rollout.samples_per_task=4"))
    assert (plan.episodes_per_update, plan.replayed_per_update) == (16, 7)
    assert plan.max_episodes_per_optimizer_step == 6
    assert make_plan(recipe()).replayed_per_update == 0
    risky = make_plan(recipe("replay.share=0.3", "replay.weighting=positive"))
    assert any("only_positive" in note for note in risky.notes)


@pytest.mark.parametrize(
    ("updates", "every", "greedy", "scheduled"),
    [(60, 20, True, 2), (61, 20, False, 3), (5, 20, True, 0), (5, 0, True, 0), (1, 1, True, 0)],
)
def test_evaluation_episodes(updates: int, every: int, greedy: bool, scheduled: int) -> None:
    plan = make_plan(
        recipe(
            f"topology.updates={updates}", f"evaluation.every_updates={every}",
            f"evaluation.greedy={str(greedy).lower()}", "evaluation.num_tasks=10", "evaluation.num_tasks_final=100",
        )
    )  # fmt: skip
    settings = 2 if greedy else 1
    assert plan.scheduled_evaluations == scheduled
    assert plan.evaluation_episodes == settings * (200 + 10 * scheduled)


def test_debug_modes_leave_out_their_half() -> None:
    assert make_plan(recipe("debug.mode=rollout_only")).optimizer_steps_per_update == 0
    plan = make_plan(recipe("debug.mode=learn_from_record", "debug.source_run=runs/a"))
    assert (plan.episodes_per_update, plan.optimizer_steps_per_update) == (0, 4)


def test_sampled_tokens_are_bounded_by_the_context_and_that_is_said() -> None:
    plan = make_plan(recipe("rollout.max_steps=100"))
    assert plan.max_sampled_tokens_per_episode == Recipe().rollout.max_context_tokens
    assert any("max_context" in note for note in plan.notes)
    assert make_plan(recipe()).notes == ()
    [wide] = make_plan(recipe("learner.ratio=sequence")).notes
    assert "clips at 3e-4" in wide
    assert not make_plan(recipe("learner.ratio=sequence", "learner.clip_high=4e-4")).notes
    assert len(make_plan(recipe("rollout.max_steps=100", "learner.learning_rate=0")).notes) == 2


def test_windows_raise_the_bounds_of_an_episode() -> None:
    small = ("rollout.max_steps=5", "rollout.max_step_tokens=30", "rollout.max_context_tokens=100")
    bounds = {}
    for policy in ("end", "truncate", "segment"):
        plan = make_plan(recipe(*small, f"rollout.context_overflow={policy}", "rollout.handover_tokens=10"))
        bounds[policy] = (plan.max_sampled_tokens_per_episode, plan.max_context_tokens_per_episode)
        assert any(("rollout.context_overflow" in note) == (policy != "end") for note in plan.notes)
    assert bounds == {"end": (100, 100), "truncate": (150, 500), "segment": (190, 900)}


def test_a_note_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.handover_tokens = 100 leave no room"):
        recipe(
            "rollout.context_overflow=segment", "rollout.handover_tokens=70", "rollout.max_step_tokens=30",
            "rollout.max_context_tokens=100",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "share", "issued"), [(8, 0.0, 8), (8, 0.25, 10), (8, 0.3, 11), (8, 1.0, 16), (100, 0.07, 107)]
)
def test_more_episodes_are_issued_by_the_share_rounded_up(samples: int, share: float, issued: int) -> None:
    # 100 * 0.07 is above 7 in floating point.
    said = recipe(f"rollout.samples_per_task={samples}", f"actors.over_issue={share}")
    assert said.episodes_per_task == issued


def said_of(*overrides: str) -> dict[str, str]:
    return {
        line.name: f"{line.shown} {line.unit}: {line.made_of}" for line in make_plan(recipe(*overrides)).flow
    }


def test_who_runs_episodes_is_said_of_every_topology() -> None:
    said = said_of()
    assert said["actors"].startswith(
        "1 actors: 1 actors.groups x 1 actors.actors_per_group; called in the main loop"
    )
    assert said["episodes at once, at most"].startswith("128 episodes: engine.max_concurrency")
    assert "the queue, at most" not in said
    assert [line.part for line in make_plan(recipe()).flow] == [*["actors run"] * 3, "supervision"]
    many = ("actors.kind=processes", "actors.groups=2", "actors.actors_per_group=3", "actors.over_issue=0.5")
    said = said_of(*many, "actors.environments_per_group=8", "actors.requests_per_group=4")
    assert said["actors"].startswith("6 actors: ")
    assert "each in a process of its own" in said["actors"]
    assert (
        said["episodes at once, at most"] == "16 episodes: 2 actors.groups x 8 actors.environments_per_group"
    )
    assert said["their requests, at most"].startswith(
        "8 requests: 2 actors.groups x 4 actors.requests_per_group"
    )
    assert said["issued of each task"].startswith("12 episodes: 8 of them count")
    assert said["one call, at most"].startswith("60 s: ")
    assert make_plan(recipe(*many, "actors.environments_per_group=8")).generation_waves == 12
    wide = ("actors.kind=threads", "actors.groups=16", "actors.environments_per_group=32")
    assert make_plan(recipe(*wide, "engine.max_concurrency=32")).generation_waves == 4
    assert make_plan(recipe("debug.mode=learn_from_record", "debug.source_run=runs/a")).generation_waves == 0
    learned = said_of("debug.mode=learn_from_record", "debug.source_run=runs/a")
    assert list(learned) == ["the run ends without progress for"]


def test_the_queue_is_said_with_what_happens_at_its_bounds() -> None:
    said = said_of("topology.kind=async", "queue.when_full=block", "queue.when_stale=wait", "queue.when_late=skip",
                   "topology.publish_every_updates=4", "topology.publish_every_s=9", "queue.batch_tokens=5000")  # fmt: skip
    assert said["the queue, at most"].startswith(
        "200 trajectories: queue.depth; full: actors begin no episode"
    )
    assert said["staleness, at most"].startswith("8 updates: ")
    assert "no episode that could come to be older" in said["staleness, at most"]
    assert said["wait for a batch, at most"].startswith("60 s: ")
    assert "waits as long again" in said["wait for a batch, at most"]
    assert said["a batch, at least"].startswith("5,000 sampled tokens")
    published = said["weights are published every"]
    assert published.startswith("4 updates: topology.publish_every_updates, or once 9 s have passed")
    assert "from the next token on" in published
    assert said["replaced, at most"].startswith("16 actors")
    assert said_of("topology.kind=async", "supervision.stop_after_s=40")[
        "an environment version rests"
    ].startswith("20 s: ")
    assert "0.5 of the last 32 attempts" in said["an environment version rests"]
    unbound = recipe("topology.kind=async").model_copy(update={"queue": QueueSection(max_staleness=None)})
    found = {line.name: line.shown for line in make_plan(unbound).flow}
    assert found["staleness, at most"] == "any number of"


def test_batches_ahead_and_serial_order_are_said() -> None:
    said = said_of(
        "topology.kind=batched_async", "topology.batches_ahead=2", "topology.swap=between_episodes"
    )
    assert said["batches ahead, at most"].startswith("2 batches: ")
    assert "until all under way have ended" in said["weights are published every"]
    assert "the queue, at most" not in said
    serial = said_of("topology.kind=async", "topology.serial=true")
    assert serial["wait for a batch, at most"].startswith("any number of s: topology.serial")
    assert serial["environments are judged by their last"].startswith("32 attempts: ")
    assert "the run ends" in serial["environments are judged by their last"]
    assert "dead without progress for" not in serial


def test_table_and_json_show_every_line() -> None:
    plan = make_plan(recipe("topology.kind=async", "topology.serial=false"))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(plan_table(plan))
    text = console.export_text()
    for line in plan.lines():
        assert line.name in text
        assert line.shown in text
    assert "16 x 8" in text
    assert json.loads(json.dumps(plan.to_dict()))["episodes_per_update"] == 128
