"""Saying what changed between two versions, from their manifests alone.

Works on stored versions: neither side's package needs to be installed.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotpot.errors import UsageError
from hotpot.ids import canonical_json
from hotpot.versions.fingerprint import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two versions.

    ``what`` is name, declared, file, param, package, perturbation or unverifiable; ``name`` says which one. ``old``
    and ``new`` are hashes (file) or values as JSON text, None where the thing is absent. ``lines`` is a unified diff
    where both texts are known.
    """

    what: str
    name: str
    old: str | None
    new: str | None
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.what == "file":
            verb = "added" if self.old is None else "removed" if self.new is None else "changed"
            return "\n".join((f"file {self.name} {verb}", *self.lines))
        return f"{self.what} {self.name}: {_absent(self.old)} -> {_absent(self.new)}"


def diff(old: Version, new: Version) -> list[Change]:
    """Return exactly what differs between two versions of one kind; empty where the strings are equal.

    Raises UsageError for versions of two kinds, which have nothing to compare.
    """
    if old.kind != new.kind:
        raise UsageError(
            f"a version of kind {old.kind!r} ({old.version}) can't be compared with one of kind {new.kind!r} "
            f"({new.version}); compare versions of one kind"
        )
    if old.version == new.version:
        return []
    before, after = json.loads(old.manifest), json.loads(new.manifest)
    changes = [*_value_changes(before, after, ("name", "declared"))]
    changes += _file_changes(
        before["files"], after["files"], json.loads(old.sources), json.loads(new.sources)
    )
    changes += _mapping_changes("param", dict(_leaves(before["params"])), dict(_leaves(after["params"])))
    changes += _mapping_changes("package", before["runs_on"], after["runs_on"])
    changes += _value_changes(before, after, ("perturbation", "unverifiable"))
    return changes


def _file_changes(
    before: Mapping[str, str],
    after: Mapping[str, str],
    old_texts: Mapping[str, str],
    new_texts: Mapping[str, str],
) -> Iterator[Change]:
    for change in _mapping_changes("file", before, after):
        path = change.name
        old_text = old_texts.get(path) if path in before else ""
        new_text = new_texts.get(path) if path in after else ""
        lines: tuple[str, ...] = ()
        if old_text is not None and new_text is not None:
            lines = tuple(
                difflib.unified_diff(
                    old_text.splitlines(),
                    new_text.splitlines(),
                    f"old/{path}",
                    f"new/{path}",
                    n=1,
                    lineterm="",
                )
            )
        yield Change(what="file", name=path, old=before.get(path), new=after.get(path), lines=lines)


def _mapping_changes(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted(before.keys() | after.keys()):
        old, new = _text(before, name), _text(after, name)
        if old != new:
            yield Change(what=what, name=name, old=old, new=new)


def _value_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], keys: Sequence[str]
) -> Iterator[Change]:
    for key in keys:
        if before[key] != after[key]:
            yield Change(what=key, name=key, old=_text(before, key), new=_text(after, key))


def _text(values: Mapping[str, Any], name: str) -> str | None:
    if name not in values:
        return None
    value = values[name]
    return value if isinstance(value, str) else canonical_json(value)


def _absent(value: str | None) -> str:
    return "(absent)" if value is None else value


def _leaves(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and JSON texts of parameters, so that 5 and "5" differ."""
    for key, value in params.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", canonical_json(value)
