"""The policy's tokenizer: ordinary transformers files, and text that stays text.

Owns encoding, decoding and the chat template's text. Knows nothing of messages or masks (see rollout's dialect).
Invariant: :meth:`PolicyTokenizer.encode_text` never yields an added token (special or not), whatever the text; the one
exception is the token for characters a vocabulary lacks. Tokenizers made here are lossless: every text decodes as it
was. Others need not be (some normalise text).
"""

import json
from collections.abc import Iterable, Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from hotpot.errors import ModelFilesError
from hotpot.ids import canonical_json

PAD, SYSTEM, USER, ASSISTANT, TOOL, CALL, END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|call|>",
    "<|end|>",
)
"""Special tokens of the tokenizers made here."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}"
    "<|system|>{{ message.content }}"
    "{%- if tools -%}{%- for tool in tools -%}"
    "{{ '\\n' + tool.function.name }}({{ tool.function.parameters.properties.keys() | join(', ') }})"
    "{%- endfor -%}{%- endif -%}"
    "<|end|>"
    "{%- elif message.role == 'user' -%}<|user|>{{ message.content }}<|end|>"
    "{%- elif message.role == 'tool' -%}<|tool|>{{ message.content }}<|end|>"
    "{%- elif message.role == 'assistant' -%}<|assistant|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "<|call|>{{ call.function.name }}("
    "{%- for key, value in call.function.arguments.items() -%}"
    "{{ key }}={{ value }}{{ ', ' if not loop.last else '' }}"
    "{%- endfor -%})"
    "{%- endfor -%}<|end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""Chat template of the tokenizers made here: role tokens, one line a tool, compact calls ``name(key=value, ...)``."""


class PolicyTokenizer:
    """A tokenizer in the format of transformers: ``tokenizer.json`` and ``tokenizer_config.json`` of one folder.

    ``bos_token`` is the text of the token a conversation may begin with, "" where there is none.

    Raises :class:`ModelFilesError` where a file, the chat template, the pad token or the end token is missing, or text
    from outside can't be kept apart from added tokens.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if name not in files:
                raise ModelFilesError(
                    f"the tokenizer has no {name}; give a model folder as transformers saves it"
                )
        self._files = dict(files)
        try:
            self._config: dict[str, Any] = json.loads(files["tokenizer_config.json"])
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ModelFilesError(
                f"tokenizer.json or tokenizer_config.json is damaged ({error}); make the model folder again"
            ) from error
        template = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else None
        self.chat_template: str = template or self._config.get("chat_template") or ""
        if not self.chat_template:
            raise ModelFilesError(
                "the tokenizer has no chat template; add chat_template.jinja to the model folder "
                "(or `chat_template` to tokenizer_config.json), or use an instruction-tuned model"
            )
        self._plain = _without_added_tokens(files["tokenizer.json"], set(self.added_ids))
        self.bos_token = self._text_of("bos_token") or ""
        self.end_id = self._special("eos_token")
        self.pad_id = self._special("pad_token", default=self.end_id)

    @classmethod
    def load(cls, folder: Path) -> "PolicyTokenizer":
        """Read the tokenizer files of a model folder."""
        if not folder.is_dir():
            raise ModelFilesError(
                f"no model folder at {folder}; make one with `hotpot model warmstart RECIPE --out {folder}`"
            )
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
        try:
            return cls({name: (folder / name).read_bytes() for name in names if (folder / name).is_file()})
        except ModelFilesError as error:
            raise ModelFilesError(f"{folder}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Id of every special token by its text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """Id of every added token by its text: the special ones, and others such as ``<tool_call>``."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items()}

    def files(self) -> dict[str, bytes]:
        """Return the files the tokenizer was made from, by name."""
        return dict(self._files)

    def encode_text(self, text: str) -> NDArray[np.int32]:
        """Return the ids of ``text`` as plain text: what looks like an added token is spelled out. int32 ``[n]``."""
        return np.asarray(self._plain.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_template(self, text: str) -> NDArray[np.int32]:
        """Return the ids of template text, added tokens parsed. int32 ``[n]``. Never give it text from outside."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, special tokens shown. Actions are read from it; it is never encoded again."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def _special(self, key: str, default: int | None = None) -> int:
        token = self._text_of(key)
        index = self._tokenizer.token_to_id(token) if token else None
        if index is None:
            if default is not None:
                return default
            raise ModelFilesError(
                f"tokenizer_config.json names no {key} that is in the vocabulary (found {token!r}); set it"
            )
        return int(index)

    def _text_of(self, key: str) -> str | None:
        """Return the text of a token that tokenizer_config.json names, as text or as an object with ``content``."""
        token = self._config.get(key)
        text: str | None = token.get("content") if isinstance(token, dict) else token
        return text


def _without_added_tokens(data: bytes, added: Set[str]) -> Tokenizer:
    """Return the tokenizer of ``tokenizer.json`` such that no text yields one of the tokens ``added``.

    Emptying the list of added tokens leaves those that the model's own vocabulary holds, too: they, and the merges
    that lead to them, are taken out. The unknown token stays, since models need it.
    """
    parts = json.loads(data)
    parts.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    model = parts["model"]
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    if isinstance(vocabulary, dict):
        model["vocab"] = {
            text: index for text, index in vocabulary.items() if text not in added or text == unknown
        }
    elif reachable := [text for text, _ in vocabulary if text in added]:
        raise ModelFilesError(
            f"the tokenizer's vocabulary is a list that holds the added tokens {reachable[:3]}, so text could spell them; "
            "use a model with a BPE tokenizer"
        )
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, added, prefix)]
    return Tokenizer.from_str(json.dumps(parts, ensure_ascii=False))


def _touches(pair: str | list[str], added: Set[str], prefix: str) -> bool:
    """Whether a merge, given as ``"a b"`` or ``["a", "b"]``, takes or makes one of the tokens ``added``."""
    first, second = pair.split(" ", 1) if isinstance(pair, str) else pair
    return first in added or second in added or first + second.removeprefix(prefix) in added


def train_tokenizer(corpus: Iterable[str], *, vocab_size: int = 512) -> PolicyTokenizer:
    """Make a small byte-level BPE tokenizer from ``corpus``: words become tokens, digits and spaces stay single,
    so that a word is the same token wherever it is copied to.

    All 256 bytes are in the vocabulary, so any text is representable. The same corpus gives the same files.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[A-Za-z_]+|\d|\s|."), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    return PolicyTokenizer(
        {
            "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
            "tokenizer_config.json": canonical_json(config).encode(),
            "chat_template.jinja": CHAT_TEMPLATE.encode(),
        }
    )
