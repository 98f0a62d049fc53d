"""The decoder against transformers, and its cache against its plain path."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hotpot.errors import ModelFilesError
from hotpot.models import Decoder, DecoderConfig, KeyValueCache
from hotpot.models.decoder_config import config_to_dict

VOCAB = 53

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, untied": {"tie_embeddings": False},
    "llama, grouped": {"num_kv_heads": 2, "rope_theta": 1000.0},
    "llama, one kv head, wide heads": {"num_kv_heads": 1, "head_dim": 20, "tie_embeddings": False},
    "qwen2": {"num_kv_heads": 2, "attention_bias": True},
    "qwen3": {"num_kv_heads": 2, "qk_norm": True, "head_dim": 12, "rms_norm_eps": 1e-5},
}
ORACLES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_decoder(**changes: Any) -> Decoder:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "max_context_tokens": 64,
    }
    decoder = Decoder(DecoderConfig(**{**values, **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            # Norms and biases too: at their initial ones and zeros a mistake in them would not show.
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2, generator=generator)
    return decoder


def oracle_of(decoder: Decoder) -> Any:
    values = config_to_dict(decoder.config)
    config_class, model_class = ORACLES[values.pop("model_type")]
    model = model_class(config_class(**values)).eval()
    state = {("" if n.startswith("lm_head") else "model.") + n: t for n, t in decoder.state_dict().items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if decoder.config.tie_embeddings else set())
    model.tie_weights()
    return model


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def plain(decoder: Decoder, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    with torch.no_grad():
        return decoder.logits(decoder(tokens, positions))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(shape: str) -> None:
    decoder = make_decoder(**SHAPES[shape])
    tokens = random_tokens(3, 40)
    with torch.no_grad():
        expected = oracle_of(decoder)(tokens).logits
    torch.testing.assert_close(plain(decoder, tokens), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", ["llama, grouped", "llama, untied", "qwen2", "qwen3"])
def test_gradients_are_those_of_transformers(shape: str) -> None:
    decoder = make_decoder(**SHAPES[shape])
    oracle = oracle_of(decoder)
    tokens = random_tokens(2, 20)
    decoder.logits(decoder(tokens, torch.arange(20).expand(2, 20))).logsumexp(-1).sum().backward()
    oracle(tokens).logits.logsumexp(-1).sum().backward()
    theirs = dict(oracle.model.named_parameters())
    for name, parameter in decoder.named_parameters():
        other = oracle.lm_head.weight if name == "lm_head.weight" else theirs[name]
        assert parameter.grad is not None
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-5 * scale, rtol=1e-4, msg=name)


@pytest.mark.parametrize("shape", ["llama", "llama, grouped", "qwen3"])
@pytest.mark.parametrize("as_slice", [True, False], ids=["slice", "index"])
def test_the_cache_path_is_the_plain_path(shape: str, as_slice: bool) -> None:
    """Ragged rows: a prompt of its own length each, then tokens one at a time, each row at its own position."""
    decoder = make_decoder(**SHAPES[shape])
    lengths = torch.tensor([5, 17, 1, 11])
    steps, width = 8, 17
    whole = random_tokens(4, 30)
    expected = plain(decoder, whole)
    cache = KeyValueCache(decoder.config, 7, 40)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(1e3)  # garbage that must not be seen
    rows: Any = slice(2, 6) if as_slice else torch.tensor([6, 0, 3, 2])
    with torch.no_grad():
        positions = torch.arange(width).expand(4, width)
        attend = (torch.arange(32) <= positions[:, :, None]).unsqueeze(1)
        hidden = decoder(whole[:, :width], positions, cache=cache, rows=rows, attend=attend)
        for row, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(
                decoder.logits(hidden[row, :length]), expected[row, :length], atol=2e-5, rtol=0
            )
        for step in range(steps):
            at = lengths[:, None] + step
            attend = (torch.arange(32) <= at[:, :, None]).unsqueeze(1)
            hidden = decoder(whole.gather(1, at), at, cache=cache, rows=rows, attend=attend)
            wanted = expected.gather(1, at[:, :, None].expand(-1, -1, VOCAB))
            torch.testing.assert_close(decoder.logits(hidden), wanted, atol=2e-5, rtol=0)
    untouched = [s for s in range(7) if s not in ([2, 3, 4, 5] if as_slice else [6, 0, 3, 2])]
    assert all(bool((cache.keys[layer][untouched] == 1e3).all()) for layer in range(2))


def test_padding_and_other_rows_change_nothing() -> None:
    decoder = make_decoder(num_kv_heads=2)
    tokens = random_tokens(4, 24)
    whole = plain(decoder, tokens)
    for length in (1, 7, 23):
        changed = tokens.clone()
        changed[:, length:] = random_tokens(4, 24 - length, seed=length)
        torch.testing.assert_close(plain(decoder, changed)[:, :length], whole[:, :length], atol=1e-5, rtol=0)
        torch.testing.assert_close(plain(decoder, tokens[:, :length]), whole[:, :length], atol=1e-5, rtol=0)
    others = random_tokens(4, 24, seed=9)
    others[2] = tokens[2]
    torch.testing.assert_close(plain(decoder, others)[2], whole[2], atol=1e-5, rtol=0)
    assert (plain(decoder, others)[1] - whole[1]).abs().max() > 0.1


def test_initialisation_is_a_function_of_the_seed() -> None:
    first, second, other = (Decoder(make_decoder(attention_bias=True).config) for _ in range(3))
    first.initialize(3)
    second.initialize(3)
    other.initialize(4)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)
    assert float(first.embed_tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert bool((first.norm.weight == 1).all())
    attention: Any = first.layers[0].self_attn
    assert bool((attention.q_proj.bias == 0).all())


def test_a_cache_needs_rows_and_what_they_attend_to() -> None:
    decoder = make_decoder()
    cache = KeyValueCache(decoder.config, 1, 8)
    with pytest.raises(ValueError, match="rows and attend"):
        decoder(random_tokens(1, 2), torch.arange(2)[None], cache=cache)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 30}, "hidden_size 30 .* num_heads 4"),
        ({"num_kv_heads": 3}, "num_heads 4 .* num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, int], named: str) -> None:
    with pytest.raises(ModelFilesError, match=named):
        make_decoder(**changes)
