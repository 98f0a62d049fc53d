"""What a pass computes, and that the fused pass is the decoder's mathematics in every shape attention takes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import hotpot.engine.embedded.attention as attention_module
import hotpot.engine.embedded.forward as forward_module
from hotpot.engine.embedded.attention import BlocksInPlace, CopiedBlocks, StreamAttention
from hotpot.engine.embedded.flights import Flight
from hotpot.engine.embedded.forward import _product, _wide, forward, rotary_table
from hotpot.engine.embedded.rows import RowTable
from hotpot.engine.embedded.store import BlockStore, block_bytes
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
        rows.enter(slot, Flight(request=request, submitted_s=0.0), 0)
    return rows


NONE = np.zeros(0, dtype=np.int64)


def test_singles_come_first_then_pieces_in_order_of_admission() -> None:
    rows = make_rows({1: 9, 4: 6, 7: 20, 2: 3})
    rows.cached[[1, 4]] = [8, 5]
    rows.cached[7] = 4
    stream = plan_stream(rows, np.array([1, 4]), [7, 2], 100)
    assert stream.num_singles == 2
    assert stream.rows.tolist() == [1, 4, *[7] * 16, *[2] * 3]
    assert stream.positions.tolist() == [8, 5, *range(4, 20), 0, 1, 2]
    assert stream.piece_rows.tolist() == [7, 2]
    assert stream.piece_starts.tolist() == [4, 0]
    assert stream.piece_lengths.tolist() == [16, 3]
    # Ascending slots, each with the place of its last token.
    assert stream.wanted_rows.tolist() == [1, 2, 4, 7]
    assert stream.wanted.tolist() == [0, 20, 1, 17]


def test_the_budget_counts_padding_and_cuts_long_prompts() -> None:
    rows = make_rows({0: 10, 1: 4, 2: 4, 3: 50})
    first = plan_stream(rows, NONE, [0, 1, 2, 3], 20)
    assert first.piece_rows.tolist() == [0, 1]
    long = plan_stream(rows, NONE, [3, 0], 20)
    assert long.piece_rows.tolist() == [3]
    assert long.piece_lengths.tolist() == [20]
    assert long.wanted.tolist() == []
    rows.cached[3] = 40
    last = plan_stream(rows, NONE, [3], 20)
    assert last.positions.tolist() == list(range(40, 50))
    assert last.wanted_rows.tolist() == [3]


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
@pytest.mark.parametrize(
    ("copied", "spread"), [(0, 2), (0, 8), (1 << 30, 2)], ids=["in place", "chosen", "copied"]
)
def test_every_pass_gives_the_decoders_logits(
    shape: str, slots: list[int], spread: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in pieces, then pieces beside single tokens, then single tokens only; ragged throughout."""
    monkeypatch.setattr(attention_module, "_COPIED_BYTES", copied)
    decoder = make_decoder(**SHAPES[shape])
    weights = PackedWeights(decoder.config)
    weights.fill(dict(decoder.named_parameters()))
    config = decoder.config
    store = BlockStore([(config.num_kv_heads, config.head_dim)] * config.num_layers, 3 * SLOTS * spread)
    blocks = np.random.default_rng(2).permutation(store.num_blocks)[: SLOTS * 4].reshape(SLOTS, 4)
    table = rotary_table(decoder.config, CONTEXT)
    rng = np.random.default_rng(1)
    rows = make_rows({slot: int(rng.integers(20, 60)) for slot in slots})
    prompts, generating = list(slots), NONE
    shapes_seen = set()
    for _ in range(40):
        stream = plan_stream(rows, generating, prompts, 24)
        shapes_seen.add((bool(stream.num_singles), bool(stream.piece_rows.size)))
        tokens = torch.from_numpy(rows.tokens[stream.rows, stream.positions].astype(np.int64))
        with torch.inference_mode():
            attention = StreamAttention(store, blocks, stream)
            logits = forward(weights, table, tokens, torch.from_numpy(stream.positions), attention)
        rows.cached[stream.piece_rows] += stream.piece_lengths
        wanted = stream.wanted_rows
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


def make_store(num_blocks: int) -> BlockStore:
    store = BlockStore([(2, 6), (1, 4)], num_blocks)
    for tensor in (*store.keys, *store.values):
        tensor.normal_()
    return store


def test_a_store_gives_back_what_was_written_where_the_table_says() -> None:
    store, table = make_store(5), np.array([[4, 0], [2, 1]])
    rows, positions = np.array([0, 1, 1]), np.array([63, 0, 33])
    keys, values = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    store.write(0, store.places(table, rows, positions), keys, values)
    found = store.gather(0, torch.from_numpy(table))
    for got, written in zip(found, (keys, values), strict=True):
        assert got.shape == (2, 2, 64, 6)
        for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
            assert torch.equal(got[row, :, position], written[token])
    assert store.num_bytes == 5 * block_bytes([(2, 6), (1, 4)]) == 5 * 32 * 2 * 4 * (12 + 4)


def test_all_sources_are_read_before_a_target_is_written() -> None:
    store = make_store(4)
    before = [tensor.clone() for tensor in (*store.keys, *store.values)]
    store.copy([(0, 1), (1, 2)])
    for tensor, old in zip((*store.keys, *store.values), before, strict=True):
        assert torch.equal(tensor[:, [1, 2]], old[:, [0, 1]])
        assert torch.equal(tensor[:, [0, 3]], old[:, [0, 3]])
    store.clear([3])
    assert all(not tensor[:, 3].any() and tensor[:, :3].all() for tensor in (*store.keys, *store.values))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_blocks_that_rows_have_in_common_give_what_they_give_one_by_one(kv_heads: int) -> None:
    """Three levels: all rows read the first blocks, halves of them the next, the rest is their own; in place and not."""
    store = BlockStore([(kv_heads, 8)], 40)
    store.keys[0].normal_(), store.values[0].normal_()
    own = np.arange(6, 18).reshape(6, 2)
    for first in (np.array([3, 4]), np.array([30, 20])):
        halves = np.array([[2], [2], [2], [5], [5], [5]])
        table = np.concatenate([np.tile(first, (6, 1)), halves, own], axis=1)
        positions = np.array([96, 101, 127, 128, 150, 159])
        q = torch.randn(6, 4, 8)
        together = BlocksInPlace(store, table, positions)
        assert len(together._runs) == 3
        found = together(0, q)
        for row in range(6):
            alone = BlocksInPlace(store, table[[row]], positions[[row]])
            assert not alone._runs
            torch.testing.assert_close(found[[row]], alone(0, q[[row]]), atol=1e-6, rtol=1e-5)
            copied = CopiedBlocks(store, table[[row]], positions[[row]])
            torch.testing.assert_close(found[[row]], copied(0, q[[row]]), atol=1e-6, rtol=1e-5)
            keys, values = store.gather(0, torch.from_numpy(table[[row]]))
            expected = F.scaled_dot_product_attention(
                q[row][None, :, None],
                keys[:, :, : positions[row] + 1],
                values[:, :, : positions[row] + 1],
                enable_gqa=True,
            )
            torch.testing.assert_close(found[row], expected.reshape(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_large_products_give_the_decoders_logits(
    shape: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_module, "_LARGE", 1)
    monkeypatch.setattr(forward_module, "_WIDE", 1)
    monkeypatch.setattr(forward_module, "_PIECE", 7)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        test_every_pass_gives_the_decoders_logits(shape, [0, 3, 4], 2, 0, monkeypatch)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_product_is_the_product_however_it_is_done(threads: int) -> None:
    weight = torch.randn(5000, 210)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 64, 65):
            x = torch.randn(rows, 210)
            torch.testing.assert_close(_wide(x, weight), x @ weight.t())
            torch.testing.assert_close(_product(x, weight), x @ weight.t())
    finally:
        torch.set_num_threads(before)
