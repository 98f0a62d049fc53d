"""Pieces and windows: every action token once, no header cut from its markup, any length."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hotpot.experience import Cutting, Markup, TrainingSequence, cut_sequence, sequences
from hotpot.experience.sequences.pieces import HEADER_TOKENS, allowed_cuts, cut_places
from hotpot.testing.records import make_trajectory

# A vocabulary of pieces of text, so that a test can read what a cut separates without the rule under test.
TEXT = (
    "<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|eot|>", "system", "user", "assistant", "tool", "\n",
    "\n\n", " to=functions.find", *(chr(code) for code in range(ord("a"), ord("z") + 1)),
)  # fmt: skip
ID = {text: index for index, text in enumerate(TEXT)}
MARKUP = Markup(
    ids=frozenset(ID[text] for text in TEXT if text.startswith("<|")),
    ends=frozenset({ID["<|im_end|>"], ID["<|eot|>"]}),
)
CONTENT = np.arange(ID["a"], len(TEXT))
CHATML = {"open": ["<|im_start|>", "{role}", "\n"], "close": ["<|im_end|>", "\n"]}
HARMONY = {"open": ["<|start|>", "{role}", " to=functions.find", "<|message|>", "\n\n"], "close": ["<|eot|>"]}
WHOLE = {
    "chatml": re.compile(r"<\|im_start\|>(system|user|assistant|tool)\n|<\|im_end\|>\n?"),
    "harmony": re.compile(
        r"<\|start\|>(system|user|assistant|tool) to=functions.find<\|message\|>\n\n|<\|eot\|>"
    ),
}


def make_sequence(tokens, mask) -> TrainingSequence:
    loss_mask = np.array(mask, dtype=bool)
    values = np.where(loss_mask, -1.0 - np.arange(len(loss_mask)), 0).astype(np.float32)
    return TrainingSequence(
        trajectory_id="0.0.0", group_id="g0", segment=0, tokens=np.array(tokens, dtype=np.int32),
        loss_mask=loss_mask, behaviour_logprobs=values, model_logprobs=2 * values,
        token_policy_version=np.where(loss_mask, 4, -1).astype(np.int32), reward=1.0,
    )  # fmt: skip


@st.composite
def conversations(draw: st.DrawFn, *, longest: int = 160) -> tuple[str, TrainingSequence]:
    """A conversation as a template renders it: given messages, and answers that end with a sampled end of turn."""
    name = draw(st.sampled_from(["chatml", "harmony"]))
    template = CHATML if name == "chatml" else HARMONY
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    close = [ID[text] for text in template["close"]]
    tokens: list[int] = []
    mask: list[bool] = []

    def give(ids: list[int]) -> None:
        tokens.extend(ids)
        mask.extend([False] * len(ids))

    def head(role: str) -> None:
        give([ID[text.format(role=role)] for text in template["open"]])

    def content(most: int) -> list[int]:
        return rng.choice(CONTENT, rng.integers(1, most + 1)).tolist()

    for role in ("system", "user"):
        head(role)
        give([*content(longest), *close])
    for turn in range(draw(st.integers(1, 6))):
        if turn:
            give(close[1:])
            for _ in range(rng.integers(1, 4)):
                head("tool")
                give([*content(longest), *close])
        head("assistant")
        said = [*content(longest), close[0]]
        tokens.extend(said)
        mask.extend([True] * len(said))
    return name, make_sequence(tokens, mask)


def check_pieces(whole: TrainingSequence, pieces: list[TrainingSequence], segment_tokens: int) -> None:
    counted = np.zeros(len(whole.tokens), dtype=int)
    covered = np.zeros(len(whole.tokens), dtype=int)
    for piece in pieces:
        part = slice(piece.begin, piece.begin + len(piece.tokens))
        assert 0 < len(piece.tokens) <= segment_tokens
        assert np.array_equal(piece.tokens, whole.tokens[part])
        assert not piece.loss_mask[0]
        counted[part] += piece.loss_mask
        covered[part] += 1
        for name, masked in (("behaviour_logprobs", 0), ("model_logprobs", 0), ("token_policy_version", -1)):
            expected = np.where(piece.loss_mask, getattr(whole, name)[part], masked)
            assert np.array_equal(getattr(piece, name), expected), name
    assert np.array_equal(counted, whole.loss_mask.astype(int))
    assert covered.all()
    assert [piece.begin for piece in pieces] == sorted({piece.begin for piece in pieces})


@given(
    num_steps=st.integers(1, 6),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    seed=st.integers(0, 1000),
    segment_tokens=st.sampled_from([64, 65, 100, 257, 1024]),
    overlap=st.floats(0, 0.5),
    special=st.integers(0, 40),
    rewritten=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_any_cut_of_any_trajectory_covers_every_action_token_once(
    num_steps, lengths, seed, segment_tokens, overlap, special, rewritten
) -> None:
    """Markup may be up to two thirds of the vocabulary: then no place is allowed for long stretches."""
    trajectory = make_trajectory(
        num_steps=num_steps, prompt_tokens=lengths[0], sampled_tokens=lengths[1], seed=seed,
        new_segment_at=num_steps - 1 if rewritten and num_steps > 1 else None,
    )  # fmt: skip
    markup = Markup(ids=frozenset(range(special)), ends=frozenset(range(special // 2)))
    cutting = Cutting(segment_tokens=segment_tokens, overlap=int(overlap * segment_tokens), markup=markup)
    for whole in sequences(trajectory):
        check_pieces(whole, cut_sequence(whole, cutting), segment_tokens)


@given(given=conversations(), segment_tokens=st.integers(64, 300), overlap=st.floats(0, 0.5))
@settings(max_examples=150, deadline=None)
def test_markup_is_never_cut_from_its_header_or_closing_text(
    given, segment_tokens: int, overlap: float
) -> None:
    """Read from the text: no cut, unless it was forced, falls inside a header or between an end of turn and its newline."""
    name, whole = given
    allowed = allowed_cuts(whole.tokens, whole.loss_mask, MARKUP)
    pieces = cut_places(
        allowed, whole.loss_mask, segment_tokens=segment_tokens, overlap=int(overlap * segment_tokens)
    )
    offsets = np.cumsum([0, *(len(TEXT[token]) for token in whole.tokens)])
    text = "".join(TEXT[token] for token in whole.tokens)
    inside = {
        place for match in WHOLE[name].finditer(text) for place in range(match.start() + 1, match.end())
    }
    generation = {
        int(offsets[place]) for place in np.flatnonzero(whole.loss_mask & ~np.roll(whole.loss_mask, 1))
    }
    for piece in pieces[1:]:
        if not piece.forced:
            assert int(offsets[piece.own]) not in inside | generation
            assert piece.begin == piece.own - 1 or int(offsets[piece.begin]) not in inside | generation
    if overlap == 0 and min(np.diff(np.flatnonzero(np.isin(whole.tokens, list(MARKUP.ends))))) > 80:
        assert not any(piece.forced for piece in pieces)


@given(given=conversations(), segment_tokens=st.integers(64, 200), overlap=st.floats(0.05, 0.5))
@settings(max_examples=60, deadline=None)
def test_a_window_owns_what_no_earlier_one_holds(given, segment_tokens: int, overlap: float) -> None:
    _, whole = given
    asked = int(overlap * segment_tokens)
    pieces = cut_sequence(whole, Cutting(segment_tokens=segment_tokens, overlap=asked, markup=MARKUP))
    assume(len(pieces) > 1)
    for number, place in enumerate(np.flatnonzero(whole.loss_mask)):
        holders = [p for p in pieces if p.begin <= place < p.begin + len(p.tokens)]
        contexts = [place - p.begin for p in holders]
        owner = next(p for p in holders if p.loss_mask[place - p.begin])
        assert place - owner.begin == max(contexts), number
    for before, piece in itertools.pairwise(pieces):
        overlapped = before.begin + len(before.tokens) - piece.begin
        assert asked <= overlapped <= asked + segment_tokens // 4


def test_a_message_begins_where_a_cut_is_best() -> None:
    given = [ID[t] for t in ("<|im_start|>", "user", "\n", "a", "b", "<|im_end|>", "\n")]
    header = [ID[t] for t in ("<|im_start|>", "assistant", "\n")]
    mask = [False] * 10 + [True] * 30
    tokens = np.array([*given, *header, *([ID["c"]] * 30)], dtype=np.int32)
    allowed = np.flatnonzero(allowed_cuts(tokens, np.array(mask), MARKUP))
    assert allowed.tolist() == [0, 7, *range(7 + HEADER_TOKENS + 1, 40)]


def test_a_generation_header_without_markup_stays_with_the_answer() -> None:
    mask = (np.arange(60) >= 20) & (np.arange(60) < 40) | (np.arange(60) >= 45)
    allowed = allowed_cuts(np.full(60, ID["a"], dtype=np.int32), mask, MARKUP)
    refused = [*range(20 - HEADER_TOKENS, 21), *range(45 - HEADER_TOKENS, 46)]
    assert np.flatnonzero(~allowed).tolist() == refused


def test_where_no_place_is_allowed_the_cut_falls_at_the_full_length_and_says_so() -> None:
    tokens = np.full(200, ID["<|im_end|>"], dtype=np.int32)
    mask = np.arange(200) % 2 == 1
    allowed = allowed_cuts(tokens, mask, MARKUP)
    pieces = cut_places(allowed, mask, segment_tokens=64, overlap=0)
    assert all(piece.forced for piece in pieces)
    assert [piece.end for piece in pieces] == [64, 128, 192, 200]


def test_a_fork_names_its_parent_in_every_piece() -> None:
    made = make_trajectory(prompt_tokens=100, sampled_tokens=60)
    fork = dataclasses.replace(made, row=dataclasses.replace(made.row, parent_trajectory_id="0.1.0"))
    pieces = [p for s in sequences(fork) for p in cut_sequence(s, Cutting(segment_tokens=64))]
    assert len(pieces) > 2
    assert {piece.parent for piece in pieces} == {"0.1.0"}
    assert {piece.parent for piece in sequences(made)} == {None}


def test_what_is_short_enough_stays_as_it_is() -> None:
    whole = make_sequence([1, 2, 3], [False, True, True])
    assert cut_sequence(whole, Cutting()) == [whole]
    assert cut_sequence(whole, Cutting(segment_tokens=64)) == [whole]


@pytest.mark.parametrize("overlap", [0, 16])
def test_pieces_of_a_piece_keep_their_place_in_the_segment(overlap: int) -> None:
    rng = np.random.default_rng(0)
    mask = np.arange(400) % 7 > 3
    whole = make_sequence(rng.choice(CONTENT, 400), mask)
    cutting = Cutting(segment_tokens=128, overlap=overlap)
    shifted = cut_sequence(dataclasses.replace(whole, begin=1000), cutting)
    assert [p.begin - 1000 for p in shifted] == [p.begin for p in cut_sequence(whole, cutting)]
