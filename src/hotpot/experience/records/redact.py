"""Secrets in text, found by pattern and replaced, before a model or a log sees them.

Owns the patterns. Knows no record: it maps text to text, and JSON to JSON. A match becomes ``[redacted:<kind>]``; where a name stands
before the secret (``password=...``) the name stays. Patterns find what looks like a secret, not what is one: they
are a net under carelessness, no wall against malice.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotpot.errors import RecipeError
from hotpot.ids import canonical_json


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretPattern:
    """One kind of secret. What the group ``keep`` matches stays, the rest of the match is replaced.

    ``hints`` are lower-case pieces of text one of which any match contains; text without them is not searched.
    """

    kind: str
    pattern: re.Pattern[str]
    hints: tuple[str, ...]


def _known(kind: str, pattern: str, *hints: str) -> SecretPattern:
    return SecretPattern(kind=kind, pattern=re.compile(pattern), hints=hints)


_SECRET_NAME = r"[a-z0-9_.-]*(?:password|passwd|pwd|secret|api[_-]?key|access[_-]?key|auth[_-]?token)"
_IS_SECRET_NAME = re.compile(_SECRET_NAME, re.IGNORECASE)

PATTERNS: tuple[SecretPattern, ...] = (
    _known(
        "private_key",
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)",
        "private key-----",
    ),
    _known("api_key", r"\bsk-[A-Za-z0-9_-]{16,}", "sk-"),
    _known("aws_access_key", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", "akia", "asia"),
    _known("github_token", r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})", "gh", "github_pat_"),
    _known("gitlab_token", r"\bglpat-[A-Za-z0-9_-]{16,}", "glpat-"),
    _known("slack_token", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}", "xox"),
    _known("hugging_face_token", r"\bhf_[A-Za-z0-9]{20,}", "hf_"),
    _known("google_key", r"\bAIza[0-9A-Za-z_-]{35}", "aiza"),
    _known("json_web_token", r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", "eyj"),
    _known("bearer_token", r"(?P<keep>\b(?i:bearer)\s+)[A-Za-z0-9._~+/=-]{8,}", "bearer"),
    _known("url_password", r"(?P<keep>\b[a-z][a-z0-9+.-]*://[^\s/:@]+:)(?!\[redacted:)[^\s/@]+(?=@)", "://"),
    _known(
        "password",
        rf"(?P<keep>\b(?i:{_SECRET_NAME})"
        r"[\"']?\s*[=:]\s*)(?!\[redacted:)(?:\"[^\"\n]+\"|'[^'\n]+'|[^\s,;&\"']+)",
        "password", "passwd", "pwd", "secret", "key", "token",
    ),
)  # fmt: skip
"""The kinds of secret that are always looked for."""


class Redactor:
    """Replaces secrets in text.

    ``patterns`` are further regular expressions (``store.redact_patterns``); their matches are replaced whole. Raises
    :class:`RecipeError` where one is no regular expression, or matches the empty text.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._known = (*PATTERNS, *(_custom(pattern) for pattern in patterns))
        # Most texts have none of them, and need not be asked pattern by pattern.
        every = all(known.hints for known in self._known)
        self._hints = tuple(hint for known in self._known for hint in known.hints) if every else ()

    def redact(self, text: str) -> tuple[str, int]:
        """Return ``text`` with every secret replaced, and how many were. Applying it again changes nothing."""
        lowered = text.lower()
        if self._hints and not _any_in(lowered, self._hints):
            return text, 0
        count = 0
        for known in self._known:
            if known.hints and not _any_in(lowered, known.hints):
                continue
            text, found = known.pattern.subn(_replacement(known), text)
            count += found
        return text, count

    def redact_named(self, name: str, value: str) -> tuple[str, int]:
        """As :meth:`redact` for the value of ``name``, which is a secret as a whole where the name says so."""
        if value and _IS_SECRET_NAME.fullmatch(name) and not value.startswith("[redacted:"):
            return "[redacted:password]", 1
        return self.redact(value)

    def redact_json(self, text: str, *, leave: Sequence[str] = ()) -> tuple[str, int]:
        """As :meth:`redact` for a JSON text, value by value so that it stays JSON; other text is taken as text.

        What stands under a key named in ``leave`` stays. The text comes back as it was where nothing is replaced.
        """
        try:
            cleaned, count = self._redact_value("", json.loads(text), frozenset(leave))
            # A text without other letters may have escaped what UTF-8 can't carry.
            written = canonical_json(cleaned, ascii_only=text.isascii())
            return (written, count) if count else (text, 0)
        except (ValueError, RecursionError):
            return self.redact(text)

    def redact_arguments(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Return a command line with its secrets replaced, also where ``--password`` and its value are two words."""
        names = ["", *(word.lstrip("-") if word.startswith("-") else "" for word in arguments)]
        return tuple(self.redact_named(name, word)[0] for name, word in zip(names, arguments, strict=False))

    def _redact_value(self, name: str, value: Any, leave: frozenset[str]) -> tuple[Any, int]:
        if isinstance(value, str):
            return self.redact_named(name, value)
        if isinstance(value, list):
            parts = [self._redact_value(name, item, leave) for item in value]
            return [part for part, _ in parts], sum(count for _, count in parts)
        if isinstance(value, dict):
            return self._redact_items(value, leave)
        if type(value) in (int, float) and _IS_SECRET_NAME.fullmatch(name):
            return "[redacted:password]", 1
        return value, 0

    def _redact_items(self, items: dict[str, Any], leave: frozenset[str]) -> tuple[dict[str, Any], int]:
        result: dict[str, Any] = {}
        count = 0
        for key, item in items.items():
            if key in leave:
                cleaned, in_key, in_item = key, 0, 0
            else:
                cleaned, in_key = self.redact(key)
                item, in_item = self._redact_value(key, item, leave)
            while in_key and cleaned in result:
                cleaned += "'"  # two secrets of a kind as keys: both items stay
            result[cleaned] = item
            count += in_key + in_item
        return result, count


def _any_in(text: str, hints: Sequence[str]) -> bool:
    for hint in hints:  # noqa: SIM110 (a generator in any() costs several times as much, and every text of a run is asked)
        if hint in text:
            return True
    return False


def _replacement(known: SecretPattern) -> str:
    kept = r"\g<keep>" if "keep" in known.pattern.groupindex else ""
    return f"{kept}[redacted:{known.kind}]"


def _custom(pattern: str) -> SecretPattern:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RecipeError(
            f"store.redact_patterns: {pattern!r} is no regular expression ({error}); correct or remove it"
        ) from error
    if compiled.search("") or "keep" in compiled.groupindex:
        raise RecipeError(
            f"store.redact_patterns: {pattern!r} matches the empty text or names a group 'keep'; narrow it"
        )
    return SecretPattern(kind="custom", pattern=compiled, hints=())
