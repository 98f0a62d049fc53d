"""Model folders: round trips through transformers, and every way a folder can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hotpot.errors import ModelFilesError
from hotpot.models import Decoder, DecoderConfig, checksum, copy_weights, load_decoder, save_model


def make_decoder(**changes: Any) -> Decoder:
    values: dict[str, Any] = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "rope_theta": 1000.0,
        "max_context_tokens": 32,
        "initializer_range": 0.3,
    }
    decoder = Decoder(DecoderConfig(**{**values, **changes}))
    decoder.initialize(1)
    return decoder


def logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return decoder.logits(decoder(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"attention_bias": True},
        {"qk_norm": True, "head_dim": 6},
    ],
    ids=str,
)
def test_a_saved_folder_loads_here_and_in_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    decoder = make_decoder(**changes)
    folder = tmp_path / "new" / "model"
    save_model(folder, decoder, {"tokenizer.json": b"{}"})
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    again = load_decoder(folder)
    assert again.config == decoder.config
    assert checksum(dict(again.named_parameters())) == checksum(dict(decoder.named_parameters()))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(logits(decoder, tokens), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("tie", [True, False])
def test_a_folder_of_transformers_loads_here(tie: bool, tmp_path: Path) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
            max_position_embeddings=32,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    )
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    decoder = load_decoder(tmp_path)
    assert decoder.config.rope_theta == 500.0
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(logits(decoder, tokens), model(tokens).logits, atol=2e-5, rtol=0)


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return edit


def _edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def _truncate(name: str, share: float) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return edit


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json.*hotpot model warmstart"),
    "config cut": (_truncate("config.json", 0.5), r"config\.json is not JSON"),
    "config incomplete": (_edit_config(hidden_size=...), "no 'hidden_size'"),
    "weights cut": (_truncate("model.safetensors", 0.7), r"model\.safetensors is truncated"),
    "weights empty": (_truncate("model.safetensors", 0.0), r"model\.safetensors is truncated"),
    "pickle": (_pickle_only, r"no \.safetensors"),
    "other architecture": (_edit_config(model_type="gpt2"), "'gpt2' is not one of"),
    "rope scaling": (_edit_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope type"),
    "activation": (_edit_config(hidden_act="gelu"), "activation"),
    "a layer missing": (
        _edit_weights(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "missing .*up_proj",
    ),
    "a weight too many": (
        _edit_weights(lambda t: t.update({"model.extra": torch.ones(2)})),
        "unexpected .*extra",
    ),
    "another width": (
        _edit_weights(lambda t: t.update({"model.norm.weight": torch.ones(9)})),
        "norm.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_with_the_remedy(damage: str, tmp_path: Path) -> None:
    change, named = DAMAGE[damage]
    save_model(tmp_path, make_decoder(), {})
    load_decoder(tmp_path)
    change(tmp_path)
    with pytest.raises(ModelFilesError, match=named) as caught:
        load_decoder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no model at .*gone"):
        load_decoder(tmp_path / "gone")


def test_saving_over_a_model_replaces_it_whole(tmp_path: Path) -> None:
    save_model(tmp_path, make_decoder(), {})
    other = make_decoder(num_layers=1)
    save_model(tmp_path, other, {})
    assert load_decoder(tmp_path).config == other.config
    assert not list(tmp_path.glob("*.partial"))


def test_the_checksum_sees_names_bits_shapes_and_types() -> None:
    weights = copy_weights(dict(make_decoder().named_parameters()))
    known = {checksum(weights)}
    assert checksum(dict(reversed(weights.items()))) in known
    name = "norm.weight"
    flipped = {**weights, name: weights[name].clone()}
    flipped[name].view(torch.int32)[3] ^= 1
    variants: list[dict[str, torch.Tensor]] = [
        flipped,
        {**weights, name: weights[name].view(1, -1)},
        {**weights, name: weights[name].double()},
        {("other" if n == name else n): t for n, t in weights.items()},
    ]
    for variant in variants:
        known.add(checksum(variant))
    assert len(known) == 5
    assert all(len(value) == 32 for value in known)


def test_copied_weights_are_out_of_reach() -> None:
    decoder = make_decoder()
    copy = copy_weights(dict(decoder.named_parameters()))
    before = checksum(copy)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(1)
    assert checksum(copy) == before
    assert not any(tensor.requires_grad for tensor in copy.values())
