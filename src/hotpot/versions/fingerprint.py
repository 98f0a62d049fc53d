"""Computing a version: the manifest of what defines a thing, and the hash over it.

Knows neither environments nor rewards. Source inspection would not do here: closures and decorated functions look
alike, and a tool that reads a CSV file changes with the file.
"""

import platform
import sqlite3
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from hotpot.errors import EnvironmentSpecError
from hotpot.ids import canonical_json, sha256_hex
from hotpot.versions.files import excluded_paths, package_files, read_files

NO_PERTURBATION = "none"
"""The perturbation that leaves no suffix."""
PROMPT_RUNS_ON = ("jinja2", "tokenizers")
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
    left_out = excluded_paths(files, exclude)
    files = {path: file for path, file in files.items() if path not in left_out}
    doubts += _unpinned(definers, (*packages, *exclude))
    if doubts and not allow_unverifiable:
        raise EnvironmentSpecError(f"the version of {name!r} can't be verified: " + "; ".join(doubts))
    hashes, sources = read_files(files)
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
    params: Mapping[str, Any] | None = None,
    runs_on: Sequence[str] = PROMPT_RUNS_ON,
) -> Version:
    """Compute the version of what turns messages into tokens.

    ``tokenizer_files`` is {file name: bytes}. ``renderers`` are importable modules of our own that write or read the
    format, ``params`` settings that change what the model is shown. The texts of system prompt, chat template and
    renderers are kept; tokenizer files are only hashed.
    Raises EnvironmentSpecError as :func:`package_version` does.
    """
    texts = {"system_prompt": system_prompt, "chat_template": chat_template}
    files: dict[str, Path] = {}
    for renderer in renderers:
        files |= package_files(renderer)
    hashes, sources = read_files(files)
    hashes |= {part: sha256_hex(text) for part, text in texts.items()}
    hashes |= {f"tokenizer/{file}": sha256_hex(data) for file, data in tokenizer_files.items()}
    return _version(
        kind="prompt",
        name=name,
        declared=declared,
        files=hashes,
        params=dict(params or {}),
        runs_on=_runs_on(runs_on),
        sources=sources | texts,
        perturbation=NO_PERTURBATION,
        unverifiable=[],
    )


def _unpinned(definers: Iterable[object], packages: Sequence[str]) -> list[str]:
    """Say of each definer why no hashed file pins it down."""
    doubts = []
    for definer in definers:
        name = getattr(definer, "__qualname__", repr(definer))
        module = getattr(definer, "__module__", None)
        if not isinstance(definer, FunctionType | BuiltinFunctionType | type) or module is None:
            doubts.append(f"{name} is no function or class of a module; write it as a function with `def`")
        elif (
            module == "__main__"
            or "<locals>" in name
            or "<lambda>" in name
            or _lookup(module, name) is not definer
        ):
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
    runtimes = {"python": platform.python_version(), "sqlite3": sqlite3.sqlite_version}
    versions = {}
    for name in names:
        try:
            versions[name] = runtimes[name] if name in runtimes else metadata.version(name)
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
    return Version(
        kind=kind, version=text, manifest=canonical_json(manifest), sources=canonical_json(sources)
    )
