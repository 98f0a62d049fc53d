"""Versions nobody can forget to bump: fingerprints of packages, parameters and what they run on.

A version string is ``name@declared+fingerprint``, and ``name@declared+fingerprint~perturbation`` where a perturbation
wraps the thing. The fingerprint is a hash over the *manifest*: every file of the package folders that define the
thing (data files too, ``__pycache__`` not), its resolved parameters, and the exact versions of the distributions and
runtimes it runs on. Source inspection would not do: closures and decorated functions look alike, and a tool that
reads a CSV file changes with it.

This module owns the manifest's form and the comparison of two of them. It does not know what an environment is.
Invariants: equal files, parameters and packages give equal strings on every machine; a perturbation is a suffix and
never part of the fingerprint. Files are read when the version is computed: compute it in the process that runs the
thing, right after importing it.
"""

import difflib
import importlib.util
import json
import os
import platform
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from hotpot.errors import EnvironmentSpecError, UsageError
from hotpot.ids import canonical_json, sha256_hex

MAX_SOURCE_BYTES = 64 * 1024
"""Text files below this size are kept whole, so that a difference can be shown line by line."""
MAX_SOURCES_BYTES = 2 * 1024 * 1024
"""All kept texts of one version together; files beyond it (in sorted order) are only hashed."""
NO_PERTURBATION = "none"
"""The perturbation that leaves no suffix."""
PROMPT_RUNS_ON = ("jinja2", "tokenizers", "transformers")
"""What renders and tokenises a chat template."""

_FINGERPRINT_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What one version string is.

    ``kind`` is env, reward or prompt. ``manifest`` is canonical JSON with the keys name, declared, files
    ({path: sha256}), params, runs_on ({package: exact version}), perturbation and unverifiable (reasons; empty when
    the fingerprint covers everything). ``sources`` is canonical JSON {path: text} of the small text files.
    """

    kind: str
    version: str
    manifest: str
    sources: str

    def __str__(self) -> str:
        return self.version


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


def package_version(
    *,
    kind: str,
    name: str,
    declared: str,
    packages: Sequence[str],
    exclude: Sequence[str] = (),
    params: Mapping[str, Any] | None = None,
    runs_on: Sequence[str] = (),
    definers: Iterable[object] = (),
    perturbation: str = NO_PERTURBATION,
    allow_unverifiable: bool = False,
) -> Version:
    """Compute the version of what the importable ``packages`` define.

    ``exclude`` names importable sub-packages or manifest paths (``pkg/sub/file.txt``) that are versioned apart.
    ``definers`` are the functions and classes that make up the thing: each must come back from importing its module
    by name, and its module must lie in ``packages`` or ``exclude``. ``runs_on`` names distributions, or the runtimes
    ``python`` (always covered) and ``sqlite3``.

    Raises EnvironmentSpecError for a package without files on disk (``__main__``, interactive, zipped), a definer
    that no file pins down, a missing distribution, or parameters that are no JSON. With ``allow_unverifiable`` the
    first two are written into the manifest instead and the fingerprint ends in ``.unverifiable``.
    """
    doubts: list[str] = []
    files: dict[str, Path] = {}
    for package in packages:
        try:
            files |= package_files(package)
        except EnvironmentSpecError as error:
            doubts.append(str(error))
    left_out = _excluded(files, exclude)
    files = {path: file for path, file in files.items() if path not in left_out}
    doubts += _unpinned(definers, (*packages, *exclude))
    if doubts and not allow_unverifiable:
        raise EnvironmentSpecError(f"the version of {name!r} can't be verified: " + "; ".join(doubts))
    hashes, sources = _read(files)
    return _version(
        kind=kind,
        name=name,
        declared=declared,
        files=hashes,
        params=dict(params or {}),
        runs_on=_runs_on(("python", *runs_on)),
        sources=sources,
        perturbation=perturbation,
        unverifiable=doubts,
    )


def prompt_version(
    system_prompt: str,
    chat_template: str,
    tokenizer_files: Mapping[str, bytes],
    *,
    name: str = "prompt",
    declared: str = "1",
    renderers: Sequence[str] = (),
    runs_on: Sequence[str] = PROMPT_RUNS_ON,
) -> Version:
    """Compute the version of what turns messages into tokens.

    ``tokenizer_files`` is {file name: bytes}. ``renderers`` are importable modules of our own that write or read the
    format. The texts of system prompt, chat template and renderers are kept; tokenizer files are only hashed.
    Raises EnvironmentSpecError as :func:`package_version` does.
    """
    texts = {"system_prompt": system_prompt, "chat_template": chat_template}
    files: dict[str, Path] = {}
    for renderer in renderers:
        files |= package_files(renderer)
    hashes, sources = _read(files)
    hashes |= {part: sha256_hex(text) for part, text in texts.items()}
    hashes |= {f"tokenizer/{file}": sha256_hex(data) for file, data in tokenizer_files.items()}
    return _version(
        kind="prompt",
        name=name,
        declared=declared,
        files=hashes,
        params={},
        runs_on=_runs_on(runs_on),
        sources=sources | texts,
        perturbation=NO_PERTURBATION,
        unverifiable=[],
    )


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
    changes += _file_changes(before["files"], after["files"], json.loads(old.sources), json.loads(new.sources))
    changes += _mapping_changes("param", dict(_leaves(before["params"])), dict(_leaves(after["params"])))
    changes += _mapping_changes("package", before["runs_on"], after["runs_on"])
    changes += _value_changes(before, after, ("perturbation", "unverifiable"))
    return changes


def package_files(package: str) -> dict[str, Path]:
    """Return every file of an importable package folder or module by its manifest path, sorted.

    The path starts with the import name (``hotpot/envs/order_desk/items.csv``), so it is the same on every machine.
    ``__pycache__`` and compiled files are left out. Raises EnvironmentSpecError where nothing on disk stands behind it.
    """
    locations, origin = _locate(package)
    base = package.replace(".", "/")
    found: dict[str, Path] = {}
    for location in locations:
        for folder, subfolders, names in os.walk(location):
            subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
            for name in sorted(names):
                file = Path(folder, name)
                if file.suffix not in (".pyc", ".pyo"):
                    found[f"{base}/{file.relative_to(location).as_posix()}"] = file
    if not locations and origin is not None:
        found[base + origin.suffix] = origin
    if not found:
        raise EnvironmentSpecError(
            f"{package!r} has no files on disk to hash; put it into a package folder or a module file and install it"
        )
    return dict(sorted(found.items()))


def _locate(package: str) -> tuple[list[str], Path | None]:
    """Return the folders of a package, or the file of a module."""
    if package.split(".")[0] in ("__main__", "builtins"):
        raise EnvironmentSpecError(
            f"{package!r} is no importable package, so its code can change unseen; move it into an installed package"
        )
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError) as error:
        raise EnvironmentSpecError(f"package {package!r} can't be found: {error}; install it") from error
    if spec is None:
        raise EnvironmentSpecError(f"package {package!r} can't be found; install it, or correct the name")
    folders = [folder for folder in spec.submodule_search_locations or () if Path(folder).is_dir()]
    origin = Path(spec.origin) if spec.origin is not None and Path(spec.origin).is_file() else None
    return folders, origin


def _excluded(files: Mapping[str, Path], exclude: Sequence[str]) -> set[str]:
    left_out: set[str] = set()
    for name in exclude:
        if "/" in name:
            matches = {path for path in files if path == name or path.startswith(name + "/")}
            if not matches:
                raise EnvironmentSpecError(f"{name!r} is to be versioned apart, but no such file exists")
            left_out |= matches
        else:
            left_out |= package_files(name).keys()
    return left_out


def _read(files: Mapping[str, Path]) -> tuple[dict[str, str], dict[str, str]]:
    """Return hashes by path, and the texts of small text files by path. Texts of hidden files are not kept."""
    hashes: dict[str, str] = {}
    sources: dict[str, str] = {}
    kept_bytes = 0
    for path, file in sorted(files.items()):
        try:
            data = file.read_bytes()
        except OSError as error:
            raise EnvironmentSpecError(f"{file} can't be read to hash it: {error}; make it readable") from error
        hashes[path] = sha256_hex(data)
        small = len(data) < MAX_SOURCE_BYTES and kept_bytes + len(data) <= MAX_SOURCES_BYTES
        if small and b"\0" not in data and not file.name.startswith("."):
            try:
                sources[path] = data.decode()
            except UnicodeDecodeError:
                continue
            kept_bytes += len(data)
    return hashes, sources


def _unpinned(definers: Iterable[object], packages: Sequence[str]) -> list[str]:
    """Say of each definer why no hashed file pins it down."""
    doubts = []
    for definer in definers:
        name = getattr(definer, "__qualname__", repr(definer))
        module = getattr(definer, "__module__", None)
        if not isinstance(definer, FunctionType | BuiltinFunctionType | type) or module is None:
            doubts.append(f"{name} is no function or class of a module; write it as a function with `def`")
        elif module == "__main__" or "<locals>" in name or "<lambda>" in name or _lookup(module, name) is not definer:
            doubts.append(
                f"{module}.{name} is a closure or interactive object that no file pins down; define it at the top "
                "level of a module in the package"
            )
        elif not any(module == package or module.startswith(package + ".") for package in packages):
            doubts.append(
                f"{module}.{name} is defined outside the hashed packages {sorted(packages)}; add its module to them"
            )
    return doubts


def _lookup(module: str, qualname: str) -> object:
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _runs_on(names: Sequence[str]) -> dict[str, str]:
    runtimes = {"python": platform.python_version, "sqlite3": lambda: sqlite3.sqlite_version}
    versions = {}
    for name in names:
        try:
            versions[name] = runtimes[name]() if name in runtimes else metadata.version(name)
        except metadata.PackageNotFoundError as error:
            raise EnvironmentSpecError(
                f"{name!r} is named under runs_on, but no such distribution is installed; install it"
            ) from error
    return versions


def _version(
    *,
    kind: str,
    name: str,
    declared: str,
    files: Mapping[str, str],
    params: Mapping[str, Any],
    runs_on: Mapping[str, str],
    sources: Mapping[str, str],
    perturbation: str,
    unverifiable: Sequence[str],
) -> Version:
    for part, text in (("name", name), ("declared version", declared), ("perturbation", perturbation)):
        if not text or any(sign in text for sign in "@+~|") or text != text.strip():
            raise EnvironmentSpecError(f"{part} {text!r} of a version must be non-empty text without @ + ~ |")
    covered = {"files": files, "params": params, "runs_on": runs_on}
    try:
        fingerprint = sha256_hex(canonical_json({"name": name, "declared": declared, **covered}))
    except (TypeError, ValueError) as error:
        raise EnvironmentSpecError(f"the parameters of {name!r} are no plain JSON: {error}") from error
    text = f"{name}@{declared}+{fingerprint[:_FINGERPRINT_CHARS]}"
    text += ".unverifiable" if unverifiable else ""
    text += f"~{perturbation}" if perturbation != NO_PERTURBATION else ""
    manifest = {"name": name, "declared": declared, **covered}
    manifest |= {"perturbation": perturbation, "unverifiable": list(unverifiable)}
    return Version(kind=kind, version=text, manifest=canonical_json(manifest), sources=canonical_json(sources))


def _file_changes(
    before: Mapping[str, str], after: Mapping[str, str], old_texts: Mapping[str, str], new_texts: Mapping[str, str]
) -> Iterator[Change]:
    for change in _mapping_changes("file", before, after):
        path = change.name
        old_text = old_texts.get(path) if path in before else ""
        new_text = new_texts.get(path) if path in after else ""
        lines: tuple[str, ...] = ()
        if old_text is not None and new_text is not None:
            lines = tuple(
                difflib.unified_diff(
                    old_text.splitlines(), new_text.splitlines(), f"old/{path}", f"new/{path}", n=1, lineterm=""
                )
            )
        yield Change(what="file", name=path, old=before.get(path), new=after.get(path), lines=lines)


def _mapping_changes(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted(before.keys() | after.keys()):
        old, new = _text(before, name), _text(after, name)
        if old != new:
            yield Change(what=what, name=name, old=old, new=new)


def _value_changes(before: Mapping[str, Any], after: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Change]:
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


def _leaves(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in params.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
