import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hotpot.config import EngineSection, Recipe, StoreSection, VllmEngineSection
from hotpot.config.load import build_recipe, load_recipe, parse_override
from hotpot.errors import RecipeError


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides)
    return str(caught.value)


def test_an_empty_file_is_the_default_recipe(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "")) == Recipe()


def test_file_then_overrides_and_everything_else_stays_default(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "small"\n[rollout]\ntasks_per_batch = 3\nmax_steps = 5\n')
    recipe = load_recipe(path, ["rollout.tasks_per_batch=7", "sampling.training.temperature=0.5", "name=x"])
    assert (recipe.name, recipe.rollout.tasks_per_batch, recipe.rollout.max_steps) == ("x", 7, 5)
    assert recipe.sampling.training.temperature == 0.5
    assert recipe.learner == Recipe().learner


def test_the_resolved_recipe_as_json_reads_back(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, '[store]\nredact_patterns = ["a+"]\n[model]\npath = "m/x"\n'))
    stored = json.loads(recipe.model_dump_json())
    assert build_recipe(stored, origin="manifest.json") == recipe
    assert stored["learner"]["beta2"] == 0.99


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1", (("a", "b"), 1)),
        ("a.b=1e-4", (("a", "b"), 1e-4)),
        ("a=true", (("a",), True)),
        ("a=models/small", (("a",), "models/small")),
        ("a='17'", (("a",), "17")),
        ("a=[1, 2]", (("a",), [1, 2])),
        ("a={x = 1}", (("a",), {"x": 1})),
        ("a=", (("a",), "")),
        ("a=b=c", (("a",), "b=c")),
        ("a=2026-01-01", (("a",), "2026-01-01")),
        ("a=1\nb=2", (("a",), "1\nb=2")),
        ("a=1 # note", (("a",), 1)),
    ],
)
def test_override_values(text: str, expected: tuple[tuple[str, ...], object]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["x", "=3", "a..b=3", "a=[1", 'a="x', "a={"])
def test_overrides_that_are_none(text: str) -> None:
    with pytest.raises(RecipeError, match="override"):
        parse_override(text)


@given(st.text(max_size=20))
def test_any_override_is_a_value_or_a_recipe_error(text: str) -> None:
    try:
        parts, _ = parse_override(f"section.key={text}")
    except RecipeError:
        return
    assert parts == ("section", "key")


def test_unknown_keys_name_the_nearest_and_the_file(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[learner]\nlearnin_rate = 1\n[rollot]\nx = 1\n")
    first, second = message.splitlines()
    assert (
        first
        == f"{tmp_path}/recipe.toml: unknown setting learner.learnin_rate; nearest: learner.learning_rate"
    )
    assert second == f"{tmp_path}/recipe.toml: unknown section or setting rollot; nearest: rollout"


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(tmp_path: Path) -> None:
    assert "nearest: rollout.tasks_per_batch" in refusal(tmp_path, "[learner]\ntasks_per_batch = 3\n")
    assert "nearest: learner.learning_rate or learner.lora_rank" in refusal(tmp_path, "", "learner.lr=3")
    assert "known here: path" in refusal(tmp_path, "[model]\nzzzzzz = 3\n")


def test_the_command_line_is_blamed_for_its_own_mistakes(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[rollout]\nmax_steps = 0\n", "evaluation.num_tasks=0")
    assert f"{tmp_path}/recipe.toml: rollout.max_steps = 0 must be > 0" in message
    assert "command line: evaluation.num_tasks = 0 must be > 0" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.learning_rate=-1", "learner.learning_rate = -1 must be >= 0.0; change it, or leave it out for 0.00015"),
        ("learner.minibatches=true", "learner.minibatches = true must be a whole number"),
        ("learner.minibatches='4'", 'learner.minibatches = "4" must be a whole number'),
        ("learner.minibatches=4.0", "learner.minibatches = 4.0 must be a whole number"),
        ("learner.clip_low=inf", "learner.clip_low = Infinity must be a finite number"),
        ("learner.advantages=best", "must be 'group_mean', 'group_normalized', 'rloo', 'reinforce_pp', 'gae' or 'vtrace'"),
        ("run.trace=yes", 'run.trace = "yes" must be true or false'),
        ("run.id=17", "run.id = 17 must be text"),
        ("run.id=?", "must match ^[A-Za-z0-9]"),
        ("env.params=3", "env.params = 3 must be a table (in TOML: [section] or {key = value}); change it, or leave it out for {}"),
        ("store.redact_patterns=[1]", "store.redact_patterns.0 = 1 must be text"),
        ("sampling.training.top_p=1.5", "sampling.training.top_p = 1.5 must be <= 1"),
        ("learner=3", "learner = 3 must be a section"),
        ("learner.minibatches=5000", "5000 is more than the 128 episodes of an update"),
        ("sampling.training.temperature=0", "is greedy: no exploration"),
        ("learner.micro_batch_tokens=511", "learner.micro_batch_tokens = 511 is less than rollout.max_context_tokens = 512: the longest episode would fit in no forward pass; raise the former"),
        ("debug.mode=learn_from_record", "debug.source_run is set exactly when"),
        ("learner.segment_tokens=63", "learner.segment_tokens = 63 leaves a piece no room for context; use 0 (off) or at least 64"),
        ("learner.segment_overlap=8", "learner.segment_overlap = 8 without learner.segment_tokens has nothing to overlap"),
        ("learner.segment_tokens=256", "learner.segment_tokens = 256 cuts episodes of up to rollout.max_context_tokens = 512 tokens"),
        ("learner.packing=tight", "must be 'padded' or 'packed'"),
    ],
)  # fmt: skip
def test_bad_values_say_path_value_rule_and_remedy(tmp_path: Path, override: str, expected: str) -> None:
    message = refusal(tmp_path, "", override)
    assert expected in message
    assert len(message.splitlines()) == 1


def test_pieces_need_recomputed_log_probabilities_and_fit_in_a_pass(tmp_path: Path) -> None:
    cut = ("learner.segment_tokens=256", "learner.old_logprobs=recomputed")
    build_recipe({}, [*cut, "learner.micro_batch_tokens=256"], origin="test")
    build_recipe({}, ["learner.segment_tokens=512"], origin="test")  # cuts nothing: no context is longer
    message = refusal(tmp_path, "", *cut, "learner.micro_batch_tokens=255")
    assert "255 is less than learner.segment_tokens = 256: a piece would fit in no forward pass" in message
    message = refusal(tmp_path, "", *cut, "learner.segment_overlap=129")
    assert "learner.segment_overlap = 129 is more than half of learner.segment_tokens = 256" in message


def test_an_override_under_a_plain_setting_is_refused(tmp_path: Path) -> None:
    assert "run = 3 is a setting, not a section" in refusal(tmp_path, "run = 3\n", "run.seed.x=3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[learner\n", "line 1"), ('x = 1\ny = "', "line 2"), ("x = 1\nx = 2\n", "line 2")],
)
def test_invalid_toml_names_the_line(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(tmp_path, text)
    assert expected in message
    assert str(tmp_path / "recipe.toml") in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    with pytest.raises(RecipeError, match=r"does not exist; nearest: .*recipe\.toml"):
        load_recipe(tmp_path / "recpe.toml")
    with pytest.raises(RecipeError, match="does not exist; give the path"):
        load_recipe(tmp_path / "nowhere" / "recipe.toml")
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(tmp_path)
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(path)


def test_dates_in_environment_parameters_become_text(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "[env.params]\nday = 2026-01-02\n"))
    assert recipe.env.params == {"day": "2026-01-02"}


def test_the_longest_episode_fits_in_a_pass_wherever_there_is_one() -> None:
    assert build_recipe({}, ["learner.micro_batch_tokens=512"], origin="x").learner.micro_batch_tokens == 512
    collects = build_recipe({}, ["learner.micro_batch_tokens=10", "debug.mode=rollout_only"], origin="x")
    assert collects.learner.micro_batch_tokens == 10


@pytest.mark.parametrize(
    ("setting", "value", "refused"),
    [
        ("s3.endpoint", "http://joe:hunter2@127.0.0.1:8333", True),
        ("s3.endpoint", "joe:hunter2@127.0.0.1", True),
        ("s3.endpoint", "https://joe:hun/ter2@host", True),
        ("lake", "s3://joe:hunter2@bucket/lake", True),
        ("lake", "s3://bucket/a@b", False),
        ("lake", "lakes/joe:a@b", False),
    ],
)
def test_no_address_holds_a_password_and_none_is_told(
    tmp_path: Path, setting: str, value: str, refused: bool
) -> None:
    overrides = (
        f"store.{setting}='{value}'",
        "store.s3.allow_http=" + str(value.startswith("http://")).lower(),
    )
    if not refused:
        build_recipe({}, overrides, origin="here")
        return
    message = refusal(tmp_path, "", *overrides)
    assert f"store.{setting} must hold no user or password" in message
    assert "AWS_SECRET_ACCESS_KEY in the environment" in message
    assert "joe" not in message
    section: dict[str, Any] = {"s3": {"endpoint": value}} if setting == "s3.endpoint" else {"lake": value}
    with pytest.raises(ValidationError) as caught:
        StoreSection(**section)
    assert "joe" not in str(caught.value)


MIX = {
    "tasks": {"mix": [{"name": "a", "kind": "order_desk"}, {"name": "b", "kind": "order_desk", "weight": 2}]}
}


def test_the_environments_of_a_recipe_are_those_of_its_mix_or_the_one_of_env() -> None:
    assert [(e.name, e.kind, e.weight) for e in build_recipe(MIX, [], origin="r").environments] == [
        ("a", "order_desk", 1.0), ("b", "order_desk", 2.0),
    ]  # fmt: skip
    (only,) = build_recipe({"env": {"kind": "coin", "params": {"x": 1}}}, [], origin="r").environments
    assert (only.name, only.kind, only.params, only.weight) == ("env", "coin", {"x": 1}, 1.0)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("env.kind=coin", "env.kind = 'coin' and tasks.mix both say"),
        ("tasks.pools=true", "nothing to sort where every task is new"),
        ("tasks.mix=[{name='a', kind='x', weigth=2}]", "unknown setting tasks.mix.0.weigth; nearest: tasks.mix.0.weight"),
        ("tasks.mix=[{name='a', kind='x'}, {name='a', kind='y'}]", "two environments of one name"),
        ("tasks.pool_weights={unseen=0, learnable=0}", "nothing new is ever learned"),
        ("learner.max_grad_norm_ratio=0.5", "would call half of all steps exploding"),
        ("learner.skip_exploding=true", ""),
    ],
)  # fmt: skip
def test_tasks_that_cannot_work_are_refused(override: str, complaint: str) -> None:
    if not complaint:
        assert build_recipe(MIX, [override], origin="r").learner.skip_exploding
        return
    with pytest.raises(RecipeError) as caught:
        build_recipe(MIX, [override], origin="r")
    assert complaint in str(caught.value)


def test_a_refill_belongs_to_training() -> None:
    with pytest.raises(RecipeError, match=r"belongs to debug\.mode = 'train'"):
        build_recipe({}, ["rollout.refill=until_signal", "debug.mode=rollout_only"], origin="r")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["queue.depth=127"], "queue.depth = 127 is less than the 128 trajectories of one batch"),
        (["topology.publish_every_updates=10"], "queue.max_staleness = 8 is below .* = 9"),
        (["queue.when_late=replay"], "replay.share = 0 is off"),
    ],
)
def test_a_queue_that_could_give_nothing_is_refused_where_there_is_one(
    overrides: list[str], complaint: str
) -> None:
    build_recipe({}, ["topology.kind=batched_async", *overrides], origin="test")
    with pytest.raises(RecipeError, match=complaint):
        build_recipe({}, ["topology.kind=async", *overrides], origin="test")
    build_recipe(
        {},
        [
            "topology.kind=async", "topology.publish_every_updates=9", "queue.depth=1", "queue.batch_tokens=9",
            "queue.when_late=replay", "replay.share=0.1",
        ],
        origin="test",
    )  # fmt: skip


def test_the_engine_is_one_of_three_kinds_each_with_its_own_settings(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, '[engine]\nkind = "vllm"\nretries = 2\n'), ["engine.precision=bfloat16"]
    )
    assert isinstance(recipe.engine, VllmEngineSection)
    assert (recipe.engine.retries, recipe.engine.precision, recipe.engine.url) == (2, "bfloat16", None)
    assert build_recipe(json.loads(recipe.model_dump_json()), origin="manifest.json") == recipe
    assert isinstance(load_recipe(write(tmp_path, "")).engine, EngineSection)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('kind = "vlm"', 'engine.kind = "vlm" must be "embedded" or "vllm" or "openai"'),
        ('kind = "vllm"\nretrys = 1', "unknown setting engine.retrys; nearest: engine.retries"),
        (
            'kind = "vllm"\nprefill_tokens = 9',
            'engine.prefill_tokens is no setting of engine.kind = "vllm"; known there: max_concurrency',
        ),
        (
            'kind = "openai"\nretries = -1',
            "engine.retries = -1 must be >= 0; change it, or leave it out for 6",
        ),
        ("in_flight = 'finish'", 'engine.in_flight is no setting of engine.kind = "embedded"'),
        ('kind = "vllm"\nmax_tokens_in_flight = 511', "is less than rollout.max_context_tokens = 512"),
        ('kind = "openai"', "can't serve what is learned"),
        ('kind = "vllm"\n[run]\ndeterministic = true', "engine.kind = 'vllm' has random numbers"),
    ],
)
def test_what_is_wrong_with_an_engine_is_said_without_pydantics_tags(
    lines: str, expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(tmp_path, f"[engine]\n{lines}\n")
