"""A critic and the estimator that needs it are set together, and what it cannot be combined with is refused."""

from pathlib import Path

import pytest

from hotpot.config.load import build_recipe, load_recipe
from hotpot.errors import RecipeError

ROOT = Path(__file__).parents[2]
CRITIC = {"critic": "separate", "advantages": "gae"}


def test_the_recipe_has_a_critic_and_everything_else_has_none() -> None:
    for path in (ROOT / "recipes").glob("*.toml"):
        learner = load_recipe(path, []).learner
        assert (learner.critic != "none") == (path.stem == "order_desk_ppo"), path
        assert (learner.advantages == "gae") == (learner.critic != "none")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"learner": {"critic": "head"}}, "learner.advantages = 'gae'"),
        (
            {"learner": {"critic": "head", "advantages": "gae", "critic_extra_epochs": 1}},
            "critic = 'separate', or 0",
        ),
        ({"learner": {"advantages": "gae"}}, "learner.critic = 'head' or 'separate'"),
        ({"learner": CRITIC, "replay": {"share": 0.3}}, "what an older policy earned"),
    ],
)
def test_half_a_setting_is_refused(sections, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build_recipe(sections, origin="test")


def test_without_groups_one_sample_of_a_task_is_enough() -> None:
    sizes = {"rollout": {"samples_per_task": 1, "tasks_per_batch": 16}}
    with pytest.raises(RecipeError, match="group baseline"):
        build_recipe(sizes, origin="test")
    assert build_recipe(sizes | {"learner": CRITIC}, origin="test").rollout.samples_per_task == 1
