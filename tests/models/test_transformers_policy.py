"""Modules of transformers as policies: the same numbers as the module itself, and as our own decoder of one folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotpot.errors import ModelFilesError
from hotpot.models import Decoder, load_policy, save_model
from hotpot.testing.modules import KINDS, make_module, write_module

ABILITIES = {
    "gpt2": True,
    "gpt_neox": True,
    "cohere": True,
    "llama": True,
    "gemma2": False,
    "mistral": False,
    "bloom": False,
    "mamba": False,
}
"""Whether a kind packs and takes a cache."""


def tokens_of(rows: int, length: int, vocab: int = 40) -> Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(7))


def logprobs(policy: Any, tokens: Tensor, **more: Any) -> Tensor:
    hidden = policy(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), **more)
    return policy.logits(hidden).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_says_what_its_module_says_and_what_it_can_do(kind: str, tmp_path: Path) -> None:
    policy = load_policy(write_module(tmp_path, kind), "transformers")
    module, tokens = make_module(kind), tokens_of(3, 30)
    with torch.no_grad():
        expected = module(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
        found = logprobs(policy, tokens)
        some = logprobs(policy, tokens, wanted=torch.tensor([0, 33, 89]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(some, expected.flatten(0, 1)[[0, 33, 89]], atol=1e-5, rtol=0)
    assert (policy.packs, policy.caches) == (ABILITIES[kind], ABILITIES[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_written_again_is_an_ordinary_one(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = load_policy(write_module(tmp_path / "one", kind), "transformers")
    save_model(tmp_path / "two", policy, {})
    again = load_policy(tmp_path / "two", "transformers")
    assert again.config == policy.config
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["config.json", "model.safetensors"]
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float32)
    with torch.no_grad():
        own = module(input_ids=tokens_of(2, 20), use_cache=False).logits.log_softmax(-1)
        assert torch.equal(own, logprobs(policy, tokens_of(2, 20)))


def test_one_folder_two_implementations_the_same_numbers_and_gradients(tmp_path: Path) -> None:
    write_module(tmp_path, "llama")
    ours, theirs = load_policy(tmp_path), load_policy(tmp_path, "transformers")
    assert isinstance(ours, Decoder)
    assert not isinstance(theirs, Decoder)
    tokens = tokens_of(4, 25)
    losses = []
    for policy in (ours, theirs):
        loss = logprobs(policy, tokens).gather(-1, tokens.roll(-1, 1)[..., None])[:, :-1].mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    gradients = {f"module.model.{name}": p.grad for name, p in ours.named_parameters()}
    compared = 0
    for name, parameter in theirs.named_parameters():
        other = gradients.get(name)
        if other is None and name == "module.lm_head.weight":
            other = gradients["module.model.lm_head.weight"]
        torch.testing.assert_close(parameter.grad, other, atol=1e-5, rtol=1e-4)
        compared += 1
    assert compared == len(list(ours.parameters()))


def test_dropout_is_never_on(tmp_path: Path) -> None:
    policy = load_policy(write_module(tmp_path, "gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5))
    policy.train()
    assert not any(module.training for module in policy.modules())
    one, other = logprobs(policy, tokens_of(2, 12)), logprobs(policy, tokens_of(2, 12))
    assert torch.equal(one, other)


def test_a_copy_has_weights_of_its_own(tmp_path: Path) -> None:
    policy = load_policy(write_module(tmp_path, "gpt2"))
    copied = policy.duplicate()
    before = logprobs(policy, tokens_of(1, 8)).detach()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    assert torch.equal(logprobs(policy, tokens_of(1, 8)), before)
    assert float((logprobs(copied, tokens_of(1, 8)).detach() - before).abs().max()) > 1e-2


def test_padding_beyond_the_context_is_not_computed(tmp_path: Path) -> None:
    policy = load_policy(write_module(tmp_path, "gpt2"))
    tokens = tokens_of(2, 72)
    positions = torch.arange(72).clamp(max=63).expand(2, -1)
    found = policy(tokens, positions, wanted=torch.tensor([3, 63, 72 + 5]))
    expected = policy(tokens[:, :64], positions[:, :64], wanted=torch.tensor([3, 63, 64 + 5]))
    assert torch.equal(found, expected)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "no_such_thing"}, "no causal language model of transformers"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, "code of its own"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"n_layer": 3}, "missing or of another shape"),
        ({"model_type": "bert"}, "bert|missing|policy"),
    ],
)
def test_what_can_not_be_a_policy_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    edit(write_module(tmp_path, "gpt2"), **changes)
    with pytest.raises(ModelFilesError, match=words):
        load_policy(tmp_path)


def test_files_that_are_not_read(tmp_path: Path) -> None:
    folder = write_module(tmp_path, "gpt2")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="adapter"):
        load_policy(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelFilesError, match="damaged"):
        load_policy(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match="pickle"):
        load_policy(folder)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertLMHeadModel(BertConfig(vocab_size=40, is_decoder=False, **shape)).save_pretrained(tmp_path)
    with pytest.raises(
        ModelFilesError, match="BertLMHeadModel can't be a policy: what it says of a token changes"
    ):
        load_policy(tmp_path)


def test_our_decoder_is_asked_for_what_it_has_not(tmp_path: Path) -> None:
    write_module(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelFilesError, match=r"model.implementation = .auto."):
        load_policy(tmp_path / "gpt2", "hotpot")
    write_module(tmp_path / "llama", "llama", rope_scaling={"rope_type": "linear", "factor": 2.0})
    scaled = load_policy(tmp_path / "llama")
    assert not isinstance(scaled, Decoder)
    assert scaled.packs
