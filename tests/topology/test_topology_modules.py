"""A model that transformers computes, trained as any other: self-test, checkpoint, resume, replay; folders others load."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from coin_recipe import SETTINGS, use_coin

from hotpot.config.load import build_recipe
from hotpot.errors import LearnerError
from hotpot.experience import RunReader
from hotpot.learner.imitation import imitate
from hotpot.models import PolicyTokenizer, checksum, load_policy, save_model
from hotpot.rollout import Dialect
from hotpot.testing.modules import write_module
from hotpot.topology.parts.ingredients import model_files, read_mix
from hotpot.topology.redo import Changes, redo
from hotpot.topology.warmstart import _demonstrations, _sequence

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def gpt2(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two layers that has seen the coin's demonstrations, with dropout and the coin policy's tokenizer."""
    folder = tmp_path_factory.mktemp("coin") / "gpt2"
    tokenizer = PolicyTokenizer.load(model)
    shape = {
        "n_embd": 64,
        "max_position_embeddings": 128,
        "vocab_size": tokenizer.vocab_size,
        "attn_pdrop": 0.1,
    }
    write_module(folder, "gpt2", tokenizer=tokenizer, **shape)
    policy = load_policy(folder)
    assert policy.implementation == "transformers"
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.3 if parameter.ndim > 1 else 1.0)
    with pytest.MonkeyPatch.context() as patch:
        use_coin(patch)
        recipe = build_recipe(SETTINGS, ["warmstart.steps=60"], origin="test")
        shown = [
            _sequence(Dialect(tokenizer), demonstration, 128)
            for demonstration in _demonstrations(recipe, read_mix(recipe), 60 * 8)
        ]
    imitate(policy, [shown[at : at + 8] for at in range(0, len(shown), 8)], recipe.warmstart)
    save_model(folder, policy, tokenizer.files())
    return folder


def told(run: Path, table: str, *columns: str) -> list[dict[str, object]]:
    return RunReader.open(run).table(table, list(columns)).to_pylist()


def events(run: Path, kind: str) -> list[dict[str, object]]:
    return [
        json.loads(str(row["detail"])) for row in told(run, "events", "kind", "detail") if row["kind"] == kind
    ]


def weights(folder: Path) -> str:
    return checksum(load_policy(folder).state_dict())


@pytest.mark.slow
def test_a_module_is_trained_resumed_and_replayed(gpt2: Path, run: Train) -> None:
    settings = [f"model.path={gpt2}", "learner.kl_coefficient=0.05", "checkpoint.keep=9"]
    folder = run(*settings, "topology.updates=2")
    found = told(folder, "updates", "update", "logprob_difference_max")
    assert [row["update"] for row in found] == [1, 2]
    assert all(float(str(row["logprob_difference_max"])) < 1e-4 for row in found)
    assert weights(folder / "checkpoints/update-000002") != weights(gpt2)
    (tested,) = events(folder, "self_test")
    assert tested["problem"] == ""
    assert int(str(tested["num_tokens_compared"])) > 0

    run(*settings, "topology.updates=3", resume=folder)
    whole = run(*settings, "topology.updates=3", "run.id=whole")
    hashes = [told(one, "updates", "batch_hash") for one in (folder, whole)]
    assert len(hashes[0]) == 3
    assert hashes[0] == hashes[1]
    assert weights(folder / "checkpoints/update-000003") == weights(whole / "checkpoints/update-000003")
    assert [one.findings.verdict for one in redo(folder, "1..3")] == ["identical"] * 3


@pytest.mark.slow
def test_a_module_with_a_value_head_and_one_that_remembers_nothing(gpt2: Path, run: Train) -> None:
    """With a window the engine computes whole contexts again, and no pass shares a prefix."""
    critic = ["learner.advantages=gae", "learner.critic=head", "topology.updates=2"]
    run(f"model.path={gpt2}", *critic)
    folder = gpt2.parent / "mistral"
    tokenizer = PolicyTokenizer.load(gpt2)
    shape = {"max_position_embeddings": 128, "vocab_size": tokenizer.vocab_size}
    write_module(folder, "mistral", tokenizer=tokenizer, **shape)
    windowed = run(
        f"model.path={folder}", "run.id=windowed", "topology.updates=1", "learner.kl_coefficient=0.1"
    )
    (row,) = told(windowed, "updates", "logprob_difference_max", "num_shared_tokens")
    assert float(str(row["logprob_difference_max"])) < 1e-4
    assert row["num_shared_tokens"] == 0
    with pytest.raises(LearnerError, match=r"MistralForCausalLM .* learner.packing = .padded."):
        run(f"model.path={folder}", "run.id=packed", "learner.packing=packed")


@pytest.mark.slow
def test_layers_computed_again_change_no_bit_of_a_modules_run(gpt2: Path, run: Train) -> None:
    settings = [f"model.path={gpt2}", "topology.updates=2", "learner.minibatches=1"]
    folder = run(*settings)
    again = run(*settings, "run.id=again", "learner.gradient_checkpointing=true")
    columns = ("losses", "grad_norms", "num_shared_tokens", "weights_checksum")
    assert told(folder, "updates", *columns) == told(again, "updates", *columns)
    assert all(row["num_shared_tokens"] for row in told(again, "updates", *columns))
    (one,) = redo(folder, "2", Changes(settings=("learner.gradient_checkpointing=true",)))
    assert one.findings.verdict == "identical"


@pytest.mark.slow
def test_either_implementation_trains_our_own_kind_of_model(model: Path, run: Train) -> None:
    """One folder, one seed: the first batch is the same, and what is learned from it up to rounding."""
    one = run("topology.updates=1", "run.id=ours")
    other = run("topology.updates=1", "run.id=theirs", "model.implementation=transformers")
    figures = [told(folder, "updates", "loss", "grad_norm", "entropy")[0] for folder in (one, other)]
    for name, value in figures[0].items():
        assert float(str(figures[1][name])) == pytest.approx(float(str(value)), rel=1e-3, abs=1e-4), name
    for update in ("update-000000", "update-000001"):
        ours, theirs = (load_policy(folder / "checkpoints" / update) for folder in (one, other))
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(theirs.state_dict()[name], tensor, atol=2e-3, rtol=0)
    (again,) = redo(other, "1")
    assert again.findings.verdict == "identical"


@pytest.mark.slow  # the GPT-2 has to be taught first
@pytest.mark.parametrize("kind", ["own", "module"])
def test_a_folder_we_write_is_an_ordinary_one(kind: str, model: Path, gpt2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = model if kind == "own" else gpt2
    policy, tokenizer = load_policy(source), PolicyTokenizer.load(source)
    dialect = Dialect(tokenizer)
    save_model(tmp_path / "out", policy, model_files(tokenizer, dialect))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert theirs.generation_config.eos_token_id == list(dialect.stop_tokens)
    assert theirs.generation_config.pad_token_id == tokenizer.pad_id
    reader = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "heads or tails"}]
    text = reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = reader(text, add_special_tokens=False, return_tensors="pt").input_ids
    np.testing.assert_array_equal(ids[0].numpy(), tokenizer.encode_template(text))
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        found = policy.logits(policy(ids, torch.arange(ids.shape[1])[None]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
