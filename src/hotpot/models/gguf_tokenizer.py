"""The tokenizer of a GGUF file, as the files transformers reads.

Owns the translation. The file has the vocabulary, the merges and the kind of each token; how text is split before the
merges it only names (``tokenizer.ggml.pre``), so a name that is not known here is refused: another split gives other
tokens, quietly. Byte-level BPE only.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from hotpot.errors import ModelFilesError
from hotpot.ids import canonical_json

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens that are added to the vocabulary: markup, and texts that are always one token."""

_NEEDED = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")

_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm(tokenizer: Tokenizer) -> None:
    """Digits stand alone, and are cut off before the rest is split: two spaces in front of a digit are one token."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_SPLITS: Mapping[str, Callable[[Tokenizer], None]] = {"gpt-2": _gpt2, "smollm": _smollm, "qwen2": _qwen2}
"""How text is split, by the name in the file: as in the tokenizers of GPT-2, SmolLM and Qwen2."""


def tokenizer_files(settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and chat_template.jinja by name, from the settings of a GGUF file.

    Raises :class:`ModelFilesError` where the tokenizer is of a kind that is not known here.
    """
    kind, split = (str(settings.get(f"tokenizer.ggml.{name}")) for name in ("model", "pre"))
    if kind != "gpt2" or split not in _SPLITS:
        raise ModelFilesError(
            f"the GGUF file has a tokenizer of kind {kind!r} that splits text as {split!r}; read are gpt2 with "
            f"{', '.join(_SPLITS)}: import the model's folder in the format of transformers instead"
        )
    if missing := [name for name in _NEEDED if name not in settings]:
        raise ModelFilesError(f"the GGUF file has no {missing[0]}; it is damaged: download or copy it again")
    texts: list[str] = settings["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in settings["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges))
    _SPLITS[split](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    # In the order of their ids: each is in the vocabulary already and keeps its id.
    for text, of_kind in zip(texts, settings["tokenizer.ggml.token_type"], strict=True):
        if of_kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(text, special=of_kind == _CONTROL, normalized=False)])
    named = _named(settings, texts)
    if settings.get("tokenizer.ggml.add_bos_token") and "bos_token" in named:
        begin = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return _files(tokenizer, named, settings.get("tokenizer.chat_template"))


def _files(tokenizer: Tokenizer, named: Mapping[str, str], template: str | None) -> dict[str, bytes]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        **named,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": canonical_json(config).encode(),
    }
    if template:
        files["chat_template.jinja"] = template.encode()
    return files


def _named(settings: Mapping[str, Any], texts: list[str]) -> dict[str, str]:
    """Return the tokens with a role, as tokenizer_config.json names them."""
    roles = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    ids = {role: settings.get(f"tokenizer.ggml.{name}") for role, name in roles.items()}
    return {role: texts[index] for role, index in ids.items() if index is not None and index < len(texts)}
