"""The files behind an importable package: which they are, their hashes, and the texts worth keeping.

Knows import names and bytes, not what a version is.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hotpot.errors import EnvironmentSpecError
from hotpot.ids import sha256_hex

MAX_SOURCE_BYTES = 64 * 1024
"""Text files below this size are kept whole, so that a difference can be shown line by line."""
MAX_SOURCES_BYTES = 2 * 1024 * 1024
"""All kept texts of one version together; files beyond it (in sorted order) are only hashed."""


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
    if package.split(".", maxsplit=1)[0] in ("__main__", "builtins"):
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


def excluded_paths(files: Mapping[str, Path], exclude: Sequence[str]) -> set[str]:
    """Return which of ``files`` are versioned apart: those of a sub-package (import name) or under a manifest path."""
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


def read_files(files: Mapping[str, Path]) -> tuple[dict[str, str], dict[str, str]]:
    """Return hashes by path, and the texts of small text files by path. Texts of hidden files are not kept."""
    hashes: dict[str, str] = {}
    sources: dict[str, str] = {}
    kept_bytes = 0
    for path, file in sorted(files.items()):
        try:
            data = file.read_bytes()
        except OSError as error:
            raise EnvironmentSpecError(
                f"{file} can't be read to hash it: {error}; make it readable"
            ) from error
        hashes[path] = sha256_hex(data)
        small = len(data) < MAX_SOURCE_BYTES and kept_bytes + len(data) <= MAX_SOURCES_BYTES
        if small and b"\0" not in data and not file.name.startswith("."):
            try:
                sources[path] = data.decode()
            except UnicodeDecodeError:
                continue
            kept_bytes += len(data)
    return hashes, sources
