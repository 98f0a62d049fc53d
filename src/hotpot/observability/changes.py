"""What exactly differs between two runs, or two versions of one run: files line by line, parameters, packages, weights.

Works on the ``versions`` tables and the manifests of the runs; neither run's packages need to be installed.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotpot.ids import canonical_json
from hotpot.observability.queries import SqlReader, rows
from hotpot.observability.scopes import scope_of
from hotpot.versions import Change, Version, diff

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs.

    ``part`` is env, reward, prompt, schema, policy, recipe, packages, code or machine; ``where`` the file with its
    line, or the setting; ``old`` and ``new`` what stands there (empty: nothing). ``scope`` is the function or class that
    a line of Python stands in, empty elsewhere.
    """

    part: str
    where: str
    old: str
    new: str
    scope: str = ""

    @property
    def place(self) -> str:
        """Part, file and line or setting, and the function where it is known."""
        return f"{self.part}: {self.where}{f' (in {self.scope})' if self.scope else ''}"

    def __str__(self) -> str:
        return f"{self.place}: - {self.old or '(nothing)'} + {self.new or '(nothing)'}"


def against(
    old: SqlReader, new: SqlReader, *, old_manifest: Mapping[str, Any], new_manifest: Mapping[str, Any]
) -> list[Difference]:
    """Return every difference between two runs; empty where they are the same in all that is recorded.

    Manifests are the runs' ``manifest.json`` as dictionaries. Names and folders of the run itself are not compared.
    """
    return [
        *_version_differences(old, new),
        *_policy_differences(old, new),
        *manifest_differences(old_manifest, new_manifest),
    ]


def known_versions(reader: SqlReader) -> dict[str, Sequence[Version]]:
    """Return every version that the run's table ``versions`` describes, by kind in order of first use."""
    found: dict[str, list[Version]] = {}
    query = "SELECT kind, version, manifest, sources FROM versions ORDER BY first_seen_us, version"
    for row in rows(reader, query):
        known = found.setdefault(row["kind"], [])
        if row["version"] not in {version.version for version in known}:
            known.append(Version(**row))
    return {kind: tuple(ones) for kind, ones in found.items()}


def between(known: Mapping[str, Sequence[Version]], kind: str, old: str, new: str) -> list[Difference]:
    """Return what differs between two versions of one kind among :func:`known_versions`.

    Where either is not described, the one difference is the version itself.
    """
    by_name = {version.version: version for version in known.get(kind, ()) if version.version in (old, new)}
    if len(by_name) == 2:
        return list(_version_difference(kind, by_name[old], by_name[new]))
    return [Difference(part=kind, where="version", old=old, new=new)]


def manifest_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what differs in two runs' manifests: settings, packages, code, machine.

    The recipe may stand there as a table or as JSON text. A key that either manifest lacks is not compared.
    """
    for part, keys in _MANIFEST_PARTS.items():
        both = [key for key in keys if key in old and key in new]
        before, after = (_part(manifest, both) for manifest in (old, new))
        yield from _leaf_differences(part, before, after)
    yield from _uncommitted(old.get("diff"), new.get("diff"))


MAX_DIFF_LINES = 40
"""Lines of a difference in uncommitted code that are shown; the manifests hold the rest."""


def _uncommitted(old: str | None, new: str | None) -> Iterator[Difference]:
    """Yield in which lines the uncommitted changes of two runs differ, where both manifests keep them."""
    if old is None or new is None or old == new:
        return
    changed = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
    removed, added = (
        [line[1:] for line in changed if line.startswith(sign)][:MAX_DIFF_LINES] for sign in ("-", "+")
    )
    yield Difference(part="code", where="uncommitted changes", old="\n".join(removed), new="\n".join(added))


# The run's own name, command and folder differ always and change nothing.
_MANIFEST_PARTS = {
    "recipe": ("recipe",),
    "packages": ("packages",),
    "code": ("commit", "diff_hash"),
    "machine": (
        "python", "platform", "host", "cpu", "num_cpus", "memory_bytes", "num_threads", "thread_variables",
    ),
}  # fmt: skip
_IGNORED = frozenset({"run.id", "run.folder", "name"})


def _part(manifest: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    if keys == ["packages"]:
        found: Mapping[str, Any] = manifest["packages"]
        return found
    if keys == ["recipe"]:
        recipe = manifest["recipe"]
        settings: Mapping[str, Any] = json.loads(recipe) if isinstance(recipe, str) else recipe
        return settings
    return {key: manifest[key] for key in keys}


def _version_differences(old: SqlReader, new: SqlReader) -> Iterator[Difference]:
    before, after = known_versions(old), known_versions(new)
    for kind in ("env", "reward", "prompt", "schema"):
        old_ones, new_ones = before.get(kind, ()), after.get(kind, ())
        known = {found.version for found in old_ones}
        unknown = [found for found in new_ones if found.version not in known]
        if not old_ones or not new_ones:
            if old_ones or new_ones:
                names = [", ".join(found.version for found in ones) for ones in (old_ones, new_ones)]
                yield Difference(part=kind, where="version", old=names[0], new=names[1])
            continue
        # A run that changed its version on the way is compared from where the old run ended.
        for found in unknown:
            yield from _version_difference(kind, old_ones[-1], found)


def _version_difference(kind: str, old: Version, new: Version) -> Iterator[Difference]:
    if kind in ("schema", "policy"):
        yield Difference(part=kind, where="version", old=old.version, new=new.version)
        yield from _leaf_differences(kind, json.loads(old.manifest), json.loads(new.manifest))
        return
    texts = json.loads(old.sources)
    for change in diff(old, new):
        if change.lines:
            yield from _hunks(kind, change, texts.get(change.name, ""))
        else:
            yield _change(kind, change)


def _change(kind: str, change: Change) -> Difference:
    old, new = change.old or "", change.new or ""
    if change.what == "file":
        # Only hashes are known of large or binary files.
        old, new = (f"sha256 {text[:12]}" if text else "" for text in (old, new))
    return Difference(part=kind, where=f"{change.what} {change.name}", old=old, new=new)


def _hunks(kind: str, change: Change, text_before: str) -> Iterator[Difference]:
    """Yield one difference for each run of changed lines in a unified diff, at its line in the old file."""
    line, removed, added, begin = 0, list[str](), list[str](), 0

    def flush() -> Iterator[Difference]:
        if removed or added:
            where = f"{change.name} line {begin}"
            # What was only added belongs to where the line before it stands.
            scope = scope_of(text_before, begin if removed else begin - 1)
            old, new = "\n".join(removed), "\n".join(added)
            yield Difference(part=kind, where=where, old=old, new=new, scope=scope)
        removed.clear()
        added.clear()

    for text in change.lines:
        if hunk := _HUNK.match(text):
            yield from flush()
            line = int(hunk[1])
        elif line == 0:
            continue  # the file names above the first hunk
        elif text.startswith("-"):
            begin = begin if removed or added else line
            removed.append(text[1:])
            line += 1
        elif text.startswith("+"):
            begin = begin if removed or added else line
            added.append(text[1:])
        else:
            yield from flush()
            line += 1
    yield from flush()


def _policy_differences(old: SqlReader, new: SqlReader) -> Iterator[Difference]:
    query = "SELECT policy_version, policy_checksum FROM steps ORDER BY policy_version, started_us LIMIT 1"
    before, after = rows(old, query), rows(new, query)
    if before and after and before[0]["policy_checksum"] != after[0]["policy_checksum"]:
        yield Difference(
            part="policy",
            where=f"starting weights (policy versions {before[0]['policy_version']} and {after[0]['policy_version']})",
            old=before[0]["policy_checksum"],
            new=after[0]["policy_checksum"],
        )


def _leaf_differences(part: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    before, after = dict(_leaves(old)), dict(_leaves(new))
    for name in sorted((before.keys() | after.keys()) - (_IGNORED if part == "recipe" else set())):
        if before.get(name) != after.get(name):
            yield Difference(part=part, where=name, old=before.get(name, ""), new=after.get(name, ""))


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):  # an empty one has no leaves: what was put into it says all
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else canonical_json(value)
