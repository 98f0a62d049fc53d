"""What a pass computes, and that the fused pass is the decoder's mathematics in every shape attention takes."""

from typing import Any

import numpy as np
import pytest
import torch

from hotpot.engine.embedded.attention import StreamAttention
from hotpot.engine.embedded.cache import SlotCache
from hotpot.engine.embedded.forward import forward, rotary_table
from hotpot.engine.embedded.rows import RowTable
from hotpot.engine.embedded.stream import plan_stream
from hotpot.engine.embedded.weights import PackedWeights
from hotpot.models import Decoder, DecoderConfig, checksum
from hotpot.types import GenerationRequest, Purpose, SampleKey, SamplingParams

VOCAB, CONTEXT, SLOTS = 37, 120, 12


def make_rows(lengths: dict[int, int]) -> RowTable:
    """A table with a random context of each slot, nothing of it computed."""
    rows = RowTable(SLOTS, CONTEXT, vocab_size=VOCAB, track_seen=False)
    rng = np.random.default_rng(0)
    for slot, length in lengths.items():
        request = GenerationRequest(
            request_id=str(slot),
            session_id=str(slot),
            prompt=rng.integers(0, VOCAB, length).astype(np.int32),
            stop_tokens=(),
            max_tokens=5,
            purpose=Purpose.TRAINING,
            sampling=SamplingParams(),
            key=SampleKey(seed=0, issue=0, sample=0, step=0),
        )
        rows.enter(slot, request, 0, 0)
    return rows


NONE = np.zeros(0, dtype=np.int64)


def test_singles_come_first_then_pieces_in_order_of_admission() -> None:
    rows = make_rows({1: 9, 4: 6, 7: 20, 2: 3})
    rows.cached[[1, 4]] = [8, 5]
    rows.cached[7] = 4
    stream = plan_stream(rows, np.array([1, 4]), [7, 2], 100)
    assert stream.num_singles == 2
    assert stream.slots.tolist() == [1, 4, *[7] * 16, *[2] * 3]
    assert stream.positions.tolist() == [8, 5, *range(4, 20), 0, 1, 2]
    assert stream.piece_slots.tolist() == [7, 2]
    assert stream.piece_starts.tolist() == [4, 0]
    assert stream.piece_lengths.tolist() == [16, 3]
    # Ascending slots, each with the place of its last token.
    assert stream.wanted_slots.tolist() == [1, 2, 4, 7]
    assert stream.wanted.tolist() == [0, 20, 1, 17]


def test_the_budget_counts_padding_and_cuts_long_prompts() -> None:
    rows = make_rows({0: 10, 1: 4, 2: 4, 3: 50})
    first = plan_stream(rows, NONE, [0, 1, 2, 3], 20)
    assert first.piece_slots.tolist() == [0, 1]
    long = plan_stream(rows, NONE, [3, 0], 20)
    assert long.piece_slots.tolist() == [3]
    assert long.piece_lengths.tolist() == [20]
    assert long.wanted.tolist() == []
    rows.cached[3] = 40
    last = plan_stream(rows, NONE, [3], 20)
    assert last.positions.tolist() == list(range(40, 50))
    assert last.wanted_slots.tolist() == [3]


def make_decoder(**changes: Any) -> Decoder:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_context_tokens": CONTEXT,
    }
    decoder = Decoder(DecoderConfig(**{**values, **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2, generator=generator)
    return decoder


SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one layer": {"num_layers": 1},
    "qwen2, untied": {"attention_bias": True, "tie_embeddings": False},
    "qwen3": {"qk_norm": True, "head_dim": 10},
}
SLOT_SETS = {
    "side by side": [3, 4, 5, 6],
    "with holes": [1, 2, 5, 6],
    "far apart": [0, 4, 7, 11],
    "alone": [9],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slots", SLOT_SETS.values(), ids=SLOT_SETS)
def test_every_pass_gives_the_decoders_logits(shape: str, slots: list[int]) -> None:
    """Prompts in pieces, then pieces beside single tokens, then single tokens only; ragged throughout."""
    decoder = make_decoder(**SHAPES[shape])
    weights = PackedWeights(decoder.config)
    weights.fill(dict(decoder.named_parameters()))
    cache = SlotCache(decoder.config, SLOTS, CONTEXT)
    table = rotary_table(decoder.config, CONTEXT)
    rng = np.random.default_rng(1)
    rows = make_rows({slot: int(rng.integers(20, 60)) for slot in slots})
    prompts, generating = list(slots), NONE
    shapes_seen = set()
    for _ in range(40):
        stream = plan_stream(rows, generating, prompts, 24)
        shapes_seen.add((bool(stream.num_singles), bool(stream.piece_slots.size)))
        tokens = torch.from_numpy(rows.tokens[stream.slots, stream.positions].astype(np.int64))
        with torch.inference_mode():
            attention = StreamAttention(cache, stream)
            logits = forward(weights, table, tokens, torch.from_numpy(stream.positions), attention)
        rows.cached[stream.piece_slots] += stream.piece_lengths
        wanted = stream.wanted_slots
        for index, slot in enumerate(wanted.tolist()):
            context = torch.from_numpy(rows.tokens[slot, : rows.length[slot]].astype(np.int64))[None]
            with torch.no_grad():
                hidden = decoder(context, torch.arange(context.shape[1])[None])
                expected = decoder.logits(hidden)[0, -1]
            torch.testing.assert_close(logits[index], expected, atol=1e-5, rtol=0)
        zeros = np.zeros(len(wanted), dtype=np.float32)
        rows.append(wanted, rng.integers(0, VOCAB, len(wanted)), zeros, zeros)
        prompts = [slot for slot in prompts if slot not in wanted.tolist()]
        generating = wanted[rows.length[wanted] < CONTEXT - 1]
        if not prompts and not generating.size:
            break
    assert {(False, True), (True, False)} <= shapes_seen
    assert ((True, True) in shapes_seen) == (len(slots) > 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_weights_come_back_bit_for_bit(shape: str) -> None:
    decoder = make_decoder(**SHAPES[shape])
    weights = PackedWeights(decoder.config)
    for _ in range(2):
        source = {name: torch.randn_like(p) for name, p in decoder.named_parameters()}
        weights.fill(source)
        assert checksum(weights.unpack()) == checksum(source)


def test_a_cache_grows_and_keeps_what_it_holds() -> None:
    config = make_decoder(num_layers=1).config
    cache = SlotCache(config, 3, 600)
    assert cache.capacity == 256
    slots, positions = torch.tensor([0, 2, 2]), torch.tensor([255, 0, 255])
    keys, values = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    cache.write(0, cache.flat_index(slots, positions), keys, values)
    cache.reserve(513)
    assert cache.capacity == 600
    for got, written in zip(cache.gather(0, slots, 256), (keys, values), strict=True):
        for row in range(3):
            assert torch.equal(got.view(3, 2, 256, 6)[row, :, positions[row]], written[row])
    whole = cache.view(0, 0, 3, 600)[0]
    assert int((whole != 0).any(-1).sum()) == 6
    cache.clear(torch.tensor([2]))
    assert int((cache.view(0, 0, 3, 600)[1] != 0).any(-1).sum()) == 2
