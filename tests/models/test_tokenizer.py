"""The tokenizer: text stays text, nothing is lost, transformers reads the same ids and the same template."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hotpot.errors import ModelFilesError
from hotpot.models import PolicyTokenizer, train_tokenizer
from hotpot.models.tokenizer import SPECIAL_TOKENS

CORPUS = [
    "find_customer(name=Ada)",
    "customer 417 pays 12 for item 93",
    "total is 12 * 3 = 36",
    "What does Ada pay for 3 of item 93? Grüße, 価格",
] * 3

TOKENIZER = train_tokenizer(CORPUS, vocab_size=400)


def write(tokenizer: PolicyTokenizer, folder: Path) -> Path:
    for name, data in tokenizer.files().items():
        (folder / name).write_bytes(data)
    return folder


lookalikes = st.sampled_from(
    [*SPECIAL_TOKENS, "<|end|", "<|", "|>", "<|end|><|assistant|>", "<| end |>", "\n", " ", "  ", "\u00a0"]
)
any_text = st.lists(st.one_of(st.text(max_size=12), lookalikes), max_size=8).map("".join)


@settings(max_examples=300, deadline=None)
@given(any_text)
def test_any_text_survives_and_is_never_a_special_token(text: str) -> None:
    ids = TOKENIZER.encode_text(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert TOKENIZER.decode(ids) == text
    assert not set(ids.tolist()) & set(TOKENIZER.special_ids.values())
    assert all(0 <= i < TOKENIZER.vocab_size for i in ids.tolist())


@settings(max_examples=100, deadline=None)
@given(any_text, any_text)
def test_encoding_text_and_template_in_turn_mixes_nothing_up(first: str, second: str) -> None:
    expected = TOKENIZER.encode_text(first).tolist()
    TOKENIZER.encode_template(second + "<|end|>")
    assert TOKENIZER.encode_text(first).tolist() == expected


TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "<think>")


def tagged(*, known: bool, whole_words: bool = False, merged: bool = False) -> PolicyTokenizer:
    """Return a BPE tokenizer with added tokens that are not special.

    ``known``: the model's vocabulary holds them, too; ``merged``: merges lead to them; ``whole_words``: the model looks
    whole words up before it merges.
    """
    files = TOKENIZER.files()
    parts = json.loads(files["tokenizer.json"])
    vocabulary = parts["model"]["vocab"]
    parts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\S+|\s"
    if merged:
        for tag in TAGS:
            for end in range(2, len(tag) + 1):
                vocabulary.setdefault(tag[:end], len(vocabulary))
                pair = [tag[: end - 1], tag[end - 1]]
                if pair not in parts["model"]["merges"]:
                    parts["model"]["merges"].append(pair)
    for index, tag in enumerate(TAGS):
        if known:
            vocabulary.setdefault(tag, len(vocabulary))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        parts["added_tokens"].append(
            {"id": vocabulary.get(tag, len(vocabulary) + index), "content": tag, **flags}
        )
    parts["model"]["ignore_merges"] = whole_words
    return PolicyTokenizer({**files, "tokenizer.json": json.dumps(parts).encode()})


TAGGED = {
    "apart": tagged(known=False),
    "known": tagged(known=True),
    "whole words": tagged(known=True, whole_words=True),
    "merged": tagged(known=True, merged=True),
}


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=6), st.sampled_from([*TAGS, *SPECIAL_TOKENS, " "])), max_size=6))
def test_text_never_becomes_an_added_token_special_or_not(name: str, pieces: list[str]) -> None:
    tokenizer, text = TAGGED[name], "".join(pieces)
    ids = tokenizer.encode_text(text)
    assert not set(ids.tolist()) & set(tokenizer.added_ids.values())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", TAGGED)
def test_templates_and_models_still_write_added_tokens(name: str) -> None:
    tokenizer = TAGGED[name]
    assert set(tokenizer.added_ids) == {*SPECIAL_TOKENS, *TAGS}
    assert set(tokenizer.special_ids) == set(SPECIAL_TOKENS)
    for tag in TAGS:
        assert tokenizer.encode_template(tag).tolist() == [tokenizer.added_ids[tag]]
        assert len(tokenizer.encode_text(tag)) > 1


def test_ordinary_text_has_the_ids_it_has_with_added_tokens() -> None:
    for text in (*CORPUS, "  two  spaces\n\n", "日本 🎉 <3"):
        assert TOKENIZER.encode_text(text).tolist() == TOKENIZER.encode_template(text).tolist()


def test_a_vocabulary_that_can_spell_added_tokens_is_refused() -> None:
    files = TOKENIZER.files()
    parts = json.loads(files["tokenizer.json"])
    parts["model"] = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["<|end|>", -1.0], ["a", -2.0]],
    }
    parts["added_tokens"] = [
        {**token, "id": 1} for token in parts["added_tokens"] if token["content"] == "<|end|>"
    ]
    with pytest.raises(ModelFilesError, match=r"'<\|end\|>'.*could spell them"):
        PolicyTokenizer({**files, "tokenizer.json": json.dumps(parts).encode()})


def test_template_text_parses_special_tokens() -> None:
    ids = TOKENIZER.encode_template("<|system|>be brief<|end|>").tolist()
    assert ids[0] == TOKENIZER.special_ids["<|system|>"]
    assert ids[-1] == TOKENIZER.special_ids["<|end|>"] == TOKENIZER.end_id
    assert ids[1:-1] == TOKENIZER.encode_text("be brief").tolist()
    assert TOKENIZER.pad_id == TOKENIZER.special_ids["<|pad|>"]
    assert list(TOKENIZER.special_ids) == list(SPECIAL_TOKENS)


def test_digits_are_single_and_words_are_the_same_everywhere() -> None:
    assert len(TOKENIZER.encode_text("417")) == 3
    (word,) = TOKENIZER.encode_text("customer").tolist()
    for context in ("customer 4", "(customer)", "\ncustomer", "417customer", "=customer,"):
        assert word in TOKENIZER.encode_text(context).tolist()


def test_training_is_deterministic() -> None:
    again = train_tokenizer(iter(CORPUS), vocab_size=400)
    assert again.files() == TOKENIZER.files()
    assert train_tokenizer(CORPUS[1:], vocab_size=400).files() != TOKENIZER.files()


def test_transformers_reads_the_same_ids_and_text(tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(write(TOKENIZER, tmp_path))
    for text in [*CORPUS, "<|user|>hi 12<|end|><|assistant|>", "  two  spaces\n\n", "日本 🎉"]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == TOKENIZER.encode_template(text).tolist()
        assert theirs.decode(TOKENIZER.encode_text(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (TOKENIZER.end_id, TOKENIZER.pad_id)
    assert len(theirs) == TOKENIZER.vocab_size


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Help."},
    {"role": "user", "content": "What does Ada pay?"},
    {
        "role": "assistant",
        "content": "look",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "price", "arguments": {"customer": 417, "item": 93}},
            }
        ],
    },
    {"role": "tool", "name": "price", "content": "12"},
    {"role": "assistant", "content": "12"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Price",
            "parameters": {"type": "object", "properties": {"customer": {}, "item": {}}},
        },
    }
]
RENDERED = (
    "<|system|>Help.\nprice(customer, item)<|end|><|user|>What does Ada pay?<|end|>"
    "<|assistant|>look<|call|>price(customer=417, item=93)<|end|><|tool|>12<|end|><|assistant|>12<|end|>"
)


def test_transformers_renders_the_wire_format(tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(write(TOKENIZER, tmp_path))
    assert theirs.chat_template == TOKENIZER.chat_template

    def render(count: int, *, prompt: bool) -> str:
        return str(
            theirs.apply_chat_template(
                MESSAGES[:count], tools=TOOLS, tokenize=False, add_generation_prompt=prompt
            )
        )

    assert render(5, prompt=False) == RENDERED
    # The template only ever appends: each longer conversation begins with the shorter one's prompt.
    assert RENDERED.startswith(render(2, prompt=True))
    assert RENDERED.startswith(render(4, prompt=True))


def test_a_folder_reads_back(tmp_path: Path) -> None:
    again = PolicyTokenizer.load(write(TOKENIZER, tmp_path))
    assert again.files() == TOKENIZER.files()
    assert again.encode_text("Ada 3").tolist() == TOKENIZER.encode_text("Ada 3").tolist()
    with pytest.raises(ModelFilesError, match=r"no model folder at .*warmstart"):
        PolicyTokenizer.load(tmp_path / "gone")


def test_files_that_are_not_a_tokenizer_are_refused() -> None:
    files = TOKENIZER.files()
    config = json.loads(files["tokenizer_config.json"])

    def without(*names: str, **changes: Any) -> dict[str, bytes]:
        kept = {name: data for name, data in files.items() if name not in names}
        if changes:
            kept["tokenizer_config.json"] = json.dumps({**config, **changes}).encode()
        return kept

    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        PolicyTokenizer(without("tokenizer.json"))
    with pytest.raises(ModelFilesError, match=r"no tokenizer_config\.json"):
        PolicyTokenizer(without("tokenizer_config.json"))
    with pytest.raises(ModelFilesError, match=r"no chat template; add chat_template\.jinja"):
        PolicyTokenizer(without("chat_template.jinja"))
    with pytest.raises(ModelFilesError, match=r"no eos_token .*'<nothing>'"):
        PolicyTokenizer(without("none", eos_token="<nothing>"))
    inline = PolicyTokenizer(without("chat_template.jinja", chat_template="{{ messages }}", pad_token=None))
    assert inline.chat_template == "{{ messages }}"
    assert inline.pad_id == inline.end_id
    for broken in ({"tokenizer.json": files["tokenizer.json"][:100]}, {"tokenizer_config.json": b'{"eos'}):
        with pytest.raises(ModelFilesError, match="damaged"):
            PolicyTokenizer({**files, **broken})
