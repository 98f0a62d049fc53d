import io
import json

import pytest
from rich.console import Console

from hotpot.config import Recipe
from hotpot.config.load import build_recipe
from hotpot.config.plan import make_plan, plan_table
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


def test_table_and_json_show_every_line() -> None:
    plan = make_plan(recipe())
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(plan_table(plan))
    text = console.export_text()
    for line in plan.lines():
        assert line.name in text
        assert f"{line.value:,}" in text
    assert "16 x 8" in text
    assert json.loads(json.dumps(plan.to_dict()))["episodes_per_update"] == 128
