"""The exact arithmetic: a token's bits hang on its own sequence only, and are the decoder's mathematics."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.errors import HotpotError
from hotpot.models import Decoder, DecoderConfig, KeyValueCache, use_threads
from hotpot.models.exact import fits

CONTEXT = 400
SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 1},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3},
    "qwen2, own heads": {"hidden_size": 16, "intermediate_size": 36, "num_heads": 2, "num_kv_heads": 2, "attention_bias": True},
    "qwen3, untied": {
        "hidden_size": 24, "intermediate_size": 33, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "qk_norm": True,
        "tie_embeddings": False,
    },
}  # fmt: skip


def make_decoder(shape: str) -> Decoder:
    decoder = Decoder(DecoderConfig(**{"vocab_size": 509, "num_layers": 2, "max_context_tokens": CONTEXT, **SHAPES[shape]}))  # type: ignore[arg-type]  # fmt: skip
    decoder.initialize(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.05, generator=generator))
    return decoder.requires_grad_(requires_grad=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    use_threads(1)
    yield
    use_threads(before)


@pytest.fixture(scope="module", params=list(SHAPES))
def whole(request: pytest.FixtureRequest) -> tuple[Decoder, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A decoder, three rows of tokens, and the exact hidden states and logits of all of them, computed together."""
    use_threads(1)
    decoder = make_decoder(request.param)
    decoder.exact = True
    tokens = torch.randint(509, (3, CONTEXT), generator=torch.Generator().manual_seed(5))
    hidden = decoder(tokens, positions(tokens))
    return decoder, tokens, hidden, decoder.logits(hidden)


def positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def test_it_is_the_decoders_mathematics(whole) -> None:
    decoder, tokens, hidden, _ = whole
    decoder.exact = False
    assert torch.allclose(hidden, decoder(tokens, positions(tokens)), atol=3e-5)
    decoder.exact = True


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_neither_company_nor_length_nor_a_cut_changes_a_bit(whole, data: st.DataObject) -> None:
    decoder, tokens, hidden, logits = whole
    rows = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4), label="rows")
    length = data.draw(st.integers(1, CONTEXT), label="length")
    part = tokens[rows, :length]
    wanted = torch.tensor(data.draw(st.lists(st.integers(0, part.numel() - 1), min_size=1, max_size=40)))
    chosen = decoder(part, positions(part), wanted=wanted)
    places = (torch.tensor(rows)[wanted // length], wanted % length)
    assert torch.equal(chosen, hidden[places])
    assert torch.equal(decoder.logits(chosen), logits[places])


@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, CONTEXT - 1), max_size=4, unique=True))
def test_kept_keys_are_as_good_as_computed_ones(whole, cuts: list[int]) -> None:
    decoder, tokens, hidden, _ = whole
    cache = KeyValueCache(decoder.config, 2, CONTEXT)
    edges = [0, *sorted(cuts), CONTEXT]
    for start, stop in itertools.pairwise(edges):
        at = torch.arange(start, stop).expand(2, -1)
        found = decoder(
            tokens[:2, start:stop],
            at,
            cache=cache,
            rows=slice(0, 2),
            attend=(torch.arange(stop) <= at[:, :, None])[:, None],
        )
        assert torch.equal(found, hidden[:2, start:stop])


def test_gradients_are_the_decoders(whole) -> None:
    decoder, tokens, _, _ = whole
    found = []
    for exact, again in ((False, False), (True, False), (True, True)):
        twin = decoder.duplicate().requires_grad_(requires_grad=True)
        twin.exact, twin.gradient_checkpointing = exact, again
        twin.logits(twin(tokens[:, :150], positions(tokens[:, :150]))).log_softmax(-1)[
            ..., 7
        ].mean().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in twin.parameters()]))
    assert torch.allclose(found[0], found[1], atol=1e-5 * float(found[0].abs().max()))
    assert torch.equal(found[1], found[2])


def test_several_threads_are_refused(whole) -> None:
    decoder, tokens, _, _ = whole
    use_threads(2)
    with pytest.raises(HotpotError, match=r"one thread, and torch computes with 2; call use_threads\(1\)"):
        decoder(tokens, positions(tokens))


def test_heads_that_were_found_inexact_do_not_promise() -> None:
    config = DecoderConfig(
        vocab_size=9, hidden_size=20, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1
    )
    assert config.head_dim == 10
    assert not fits(config)
    assert not Decoder(config).can_be_exact
