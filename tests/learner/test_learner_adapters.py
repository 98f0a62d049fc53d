"""Adapters: what learns, what is published and kept, what is refused; and peft reads what was written."""

import json
import sys
from pathlib import Path

import pytest
import torch
from learner_cases import batch_of, make_batch, make_decoder
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hotpot.config.load import build_recipe
from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError, ModelFilesError, RecipeError
from hotpot.learner import Learner
from hotpot.learner.batches.passes import lay_out
from hotpot.learner.scores.forward import score
from hotpot.models import Decoder, checksum, load_decoder, load_policy, save_model
from hotpot.testing.modules import write_module

FILES = {"tokenizer.json": b"{}"}


def make_learner(decoder: Decoder | None = None, *, seed: int = 0, **settings: object) -> Learner:
    chosen = {"learning_rate": 1e-2, "minibatches": 2, "lora_rank": 4, "lora_alpha": 8.0, **settings}
    reference = chosen.pop("reference", None)
    decoder = decoder or make_decoder()
    return Learner(
        decoder, LearnerSection(**chosen), total_updates=10, seed=seed, temperature=1.0,
        reference=decoder if reference == "itself" else reference,
    )  # fmt: skip


def trained(updates: int = 2, **settings: object) -> Learner:
    learner = make_learner(**settings)
    for update in range(1, updates + 1):
        learner.update(make_batch(), update=update, policy_version=3)
    return learner


def logprobs(policy: Decoder) -> torch.Tensor:
    with torch.no_grad():
        micro = lay_out([[member] for member in batch_of(make_batch()).sequences])
        return score(policy, micro, temperature=1.0).logprobs


def test_new_adapters_change_no_bit_and_only_they_learn() -> None:
    decoder = make_decoder()
    with torch.no_grad():
        decoder.layers[0].mlp.up_proj.weight[0] = -0.0
    before, random_state = checksum(decoder.state_dict()), torch.get_rng_state()
    learner = make_learner(decoder)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert checksum(learner.weights()) == before
    assert torch.equal(logprobs(learner.decoder), logprobs(decoder))
    result = learner.update(make_batch(), update=1, policy_version=3)
    assert result.skipped_steps == 0
    assert checksum(decoder.state_dict()) == before != checksum(learner.weights())
    learning = {name for name, value in learner.decoder.named_parameters() if value.requires_grad}
    assert len(learning) == 2 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in learning)
    graded = {name for name, value in learner.decoder.named_parameters() if value.grad is not None}
    assert graded == learning
    state = learner._parts.optimizer.state
    assert sum(value["exp_avg"].numel() for value in state.values()) == sum(
        value.numel() for name, value in learner.decoder.named_parameters() if name in learning
    )
    assert all(parameter.requires_grad and parameter.grad is None for parameter in decoder.parameters())


def test_what_is_published_is_what_computes_under_the_policys_own_names() -> None:
    learner = trained(updates=3)
    merged = learner.policy()
    assert type(merged) is Decoder
    assert list(merged.state_dict()) == list(make_decoder().state_dict())
    assert torch.allclose(logprobs(merged), logprobs(learner.decoder), atol=1e-5)
    assert not torch.allclose(logprobs(merged), logprobs(make_decoder()), atol=1e-2)
    # What no adapter is on is shared, not copied.
    base = learner._parts.adapters.base
    assert merged.embed_tokens.weight.data_ptr() == base.embed_tokens.weight.data_ptr()


def test_by_the_papers_formula() -> None:
    learner = trained(lora_targets=("q_proj",))
    own = dict(learner.decoder.named_parameters())
    for layer in range(2):
        name = f"layers.{layer}.self_attn.q_proj"
        down, up = (own[f"{name}.lora_{part}.default.weight"] for part in "AB")
        wanted = make_decoder().get_parameter(f"{name}.weight") + 8.0 / 4 * up @ down
        assert torch.allclose(learner.weights()[f"{name}.weight"], wanted, atol=1e-7)


def test_the_seed_draws_the_adapters() -> None:
    first, same, other = (make_learner(seed=seed)._parts.adapters.tensors() for seed in (1, 1, 2))
    assert checksum(first) == checksum(same) != checksum(other)


# peft asks transformers for a name that the latter will drop.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_checkpoint_is_a_model_folder_and_an_adapter_of_peft(tmp_path: Path) -> None:
    learner = trained(updates=3)
    save_model(tmp_path / "start", make_decoder(), {})
    learner.save(tmp_path / "checkpoint", FILES)
    names = {str(path.relative_to(tmp_path / "checkpoint")) for path in (tmp_path / "checkpoint").rglob("*")}
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors", "learner.json"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    assert checksum(load_decoder(tmp_path / "checkpoint").state_dict()) == checksum(learner.weights())
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(start, tmp_path / "checkpoint" / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        wanted = learner.decoder.logits(learner.decoder(tokens, torch.arange(19)[None]))
        for oracle in (adapted, whole):
            assert torch.allclose(oracle(tokens).logits, wanted, atol=1e-4)
    moments = load_file(tmp_path / "checkpoint" / "learner" / "optimizer.safetensors")
    assert moments
    assert all(".lora_" in name for name in moments)


@pytest.mark.parametrize(
    "more",
    [{}, {"advantages": "gae", "critic": "head"}, {"advantages": "gae", "critic": "separate"}],
    ids=["alone", "head", "separate"],
)
def test_continuing_is_bit_identical(tmp_path: Path, more) -> None:
    straight = trained(updates=1, **more)
    straight.save(tmp_path, FILES)
    resumed = trained(updates=2, **more)
    resumed.load(tmp_path)
    for update in (2, 3):
        one, two = (
            learner.update(make_batch(), update=update, policy_version=3) for learner in (straight, resumed)
        )
        assert one.losses.tobytes() == two.losses.tobytes()
        assert one.grad_norms.tobytes() == two.grad_norms.tobytes()
    assert checksum(resumed.weights()) == checksum(straight.weights())
    if resumed.critic is not None:
        assert checksum(resumed.critic.state_dict()) == checksum(straight.critic.state_dict())
        assert bool(resumed.critic.head.weight.any())


def test_another_base_is_refused_with_both_checksums(tmp_path: Path) -> None:
    trained().save(tmp_path, FILES)
    other = make_decoder(seed=1)
    learner = make_learner(other)
    with pytest.raises(ModelFilesError) as caught:
        learner.load(tmp_path)
    for decoder in (make_decoder(), other):
        assert checksum(decoder.state_dict()) in str(caught.value)
    assert checksum(learner.weights()) == checksum(other.state_dict())


@pytest.mark.parametrize("asked", [{"lora_rank": 2}, {"lora_alpha": 9.0}, {"lora_targets": ("q_proj",)}])
def test_adapters_of_another_shape_are_refused(tmp_path: Path, asked) -> None:
    trained().save(tmp_path, FILES)
    with pytest.raises(ModelFilesError, match=r"adapters of .*settings ask for"):
        make_learner(**asked).load(tmp_path)


def test_from_all_weights_to_adapters_and_back_is_refused(tmp_path: Path) -> None:
    full = {"lora_rank": 0, "lora_alpha": 16.0}
    for name, written, asked in (("full", full, {}), ("adapters", {}, full)):
        trained(**written).save(tmp_path / name, FILES)
        with pytest.raises(ModelFilesError, match=r"set learner\.lora_rank as it was"):
            make_learner(**asked).load(tmp_path / name)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_is_refused_and_changes_nothing(tmp_path: Path, name: str, damage: str) -> None:
    trained().save(tmp_path, FILES)
    path = tmp_path / "adapter" / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[-3] ^= 0x40
        path.write_bytes(data)
    learner = trained(updates=1)
    before = checksum(learner.weights())
    with pytest.raises(ModelFilesError):
        learner.load(tmp_path)
    assert checksum(learner.weights()) == before


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_reference_below_the_adapters_is_a_separately_loaded_one_to_the_bit(kl_in: str) -> None:
    found = []
    for reference in (make_decoder(), "itself"):
        learner = make_learner(kl_coefficient=0.1, kl_in=kl_in, reference=reference)
        results = [learner.update(make_batch(), update=n, policy_version=3) for n in (1, 2)]
        assert results[1].terms.reference_checksum == checksum(make_decoder().state_dict())
        assert results[1].reference_kl is None or results[1].reference_kl > 1e-4
        found.append(([r.losses.tobytes() for r in results], checksum(learner.weights())))
    assert found[0] == found[1]


def test_without_adapters_a_policy_is_no_reference_of_itself() -> None:
    with pytest.raises(LearnerError, match="would learn with it"):
        make_learner(lora_rank=0, lora_alpha=16.0, kl_coefficient=0.1, reference="itself")


def test_checkpointed_layers_and_bfloat16_go_with_it() -> None:
    exact = trained(old_logprobs="recomputed")
    assert checksum(trained(old_logprobs="recomputed", gradient_checkpointing=True).weights()) == checksum(
        exact.weights()
    )
    rough = [trained(old_logprobs="recomputed", precision="bfloat16") for _ in range(2)]
    assert checksum(rough[0].weights()) == checksum(rough[1].weights()) != checksum(exact.weights())


@pytest.mark.parametrize("target", ["lm_head", "norm", "qproj"])
def test_targets_are_linear_layers(target: str) -> None:
    with pytest.raises(LearnerError, match=rf"names {target}, .*down_proj, gate_proj.*q_proj"):
        make_learner(make_decoder(tie_embeddings=False), lora_targets=("q_proj", target))


def test_without_peft_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RecipeError, match=r"learner.lora_rank = 4 needs the package peft.*hotpot\[lora\]"):
        make_learner()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (["learner.lora_alpha=4"], "says how adapters learn"),
        (["learner.lora_rank=4", "learner.lora_targets=[]"], "nothing would learn"),
    ],
)
def test_settings_that_mean_nothing_are_refused(told: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build_recipe({}, told, origin="test")


def test_the_adapters_configuration_is_the_same_in_every_process(tmp_path: Path) -> None:
    trained().save(tmp_path, FILES)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(LearnerSection().lora_targets)
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8.0, 0.0)


# peft asks transformers for a name that the latter will drop.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("gpt_neox", ("query_key_value", "dense_h_to_4h")), ("gemma2", ("q_proj", "down_proj"))],
)
def test_a_module_of_transformers_learns_by_adapters_too(tmp_path: Path, kind: str, targets) -> None:
    start = write_module(tmp_path / "start", kind)
    base = load_policy(start)
    before = checksum(base.state_dict())
    learner = make_learner(base, lora_targets=targets, reference="itself", kl_coefficient=0.1)
    learner.update(make_batch(), update=1, policy_version=3)
    learner.save(tmp_path / "checkpoint", {})
    assert checksum(base.state_dict()) == before != checksum(learner.weights())
    assert list(learner.weights()) == list(base.state_dict())
    resumed = make_learner(load_policy(start), lora_targets=targets, reference="itself", kl_coefficient=0.1)
    resumed.load(tmp_path / "checkpoint")
    assert checksum(resumed.weights()) == checksum(learner.weights())
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        tmp_path / "checkpoint" / "adapter",
    )
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        wanted = learner.decoder.logits(learner.decoder(tokens, torch.arange(19)[None]))
        plain = base.logits(base(tokens, torch.arange(19)[None]))
        assert not torch.allclose(wanted, plain, atol=1e-3)
        for oracle in (adapted, whole):
            assert torch.allclose(oracle(tokens, use_cache=False).logits, wanted, atol=1e-4)
    again = make_learner(
        base, lora_targets=targets, reference="itself", kl_coefficient=0.1, gradient_checkpointing=True
    )
    again.update(make_batch(), update=1, policy_version=3)
    assert checksum(again.weights()) == checksum(learner.weights())
    base.checkpoints = False
    with pytest.raises(LearnerError, match="can't be computed again"):
        make_learner(base, lora_targets=targets, gradient_checkpointing=True)
