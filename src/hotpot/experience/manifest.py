"""The manifest of a run: what it was started with, and on what. Written once, atomically.

Owns ``manifest.json``. Collects code, packages, hardware and threads by itself; the recipe comes from the caller as
JSON text. Knows no table. A missing git, repository or commit is None, never an error.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hotpot.errors import RunFolderError
from hotpot.experience.wal import sync_folder
from hotpot.types import SCHEMA_VERSION

MANIFEST_NAME = "manifest.json"
MANIFEST_DRAFT = "manifest.json.draft"

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a run was started with.

    ``recipe`` is the resolved recipe as JSON text. ``commit`` is the user's commit and ``diff_hash`` the SHA-256 over
    the uncommitted changes (tracked and untracked), both None outside a repository; ``diff_hash`` is empty where
    nothing is changed. ``packages`` maps distributions to versions, ``thread_variables`` environment variables to values.
    """

    run_id: str
    schema_version: int
    created_us: int
    seed: int
    num_threads: int
    recipe: str
    command: tuple[str, ...]
    working_folder: str
    commit: str | None
    diff_hash: str | None
    python: str
    platform: str
    host: str
    cpu: str
    num_cpus: int
    memory_bytes: int
    packages: dict[str, str]
    thread_variables: dict[str, str]


def collect_manifest(*, run_id: str, recipe: str, seed: int, num_threads: int) -> Manifest:
    """Return the manifest of a run that starts now, in this process and working folder."""
    here = Path.cwd()
    commit, diff_hash = _code_state(here)
    return Manifest(
        run_id=run_id,
        schema_version=SCHEMA_VERSION,
        created_us=time.time_ns() // 1_000,
        seed=seed,
        num_threads=num_threads,
        recipe=recipe,
        command=tuple(sys.argv),
        working_folder=str(here),
        commit=commit,
        diff_hash=diff_hash,
        python=platform.python_version(),
        platform=platform.platform(),
        host=platform.node(),
        cpu=_cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        packages=_packages(),
        thread_variables={name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    )


def write_manifest(run_folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically: a reader sees all of it or none. Raises :class:`RunFolderError` if it can't."""
    path, draft = run_folder / MANIFEST_NAME, run_folder / MANIFEST_DRAFT
    text = json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n"
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(run_folder)
    except OSError as error:
        raise RunFolderError(f"can't write {path}: {error}; check space and rights") from error


def read_manifest(run_folder: Path) -> Manifest:
    """Return the manifest of a run folder. Raises :class:`RunFolderError` where it is missing or not readable."""
    path = run_folder / MANIFEST_NAME
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Manifest)}
        values = {name: value for name, value in values.items() if name in known}
        return Manifest(**{**values, "command": tuple(values["command"])})
    except FileNotFoundError as error:
        raise RunFolderError(
            f"{run_folder} is no run folder: it has no {MANIFEST_NAME}; `hotpot runs` lists runs"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"can't read {path}: {error!r}; restore it from a copy") from error


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _code_state(folder: Path) -> tuple[str | None, str | None]:
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        return None, None
    root = Path(top.decode(errors="replace").strip())
    commit = _git(root, "rev-parse", "HEAD")
    diff = _git(root, "diff", "HEAD", "--binary") if commit is not None else b""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    digest = hashlib.sha256(diff or b"")
    names = sorted(filter(None, (untracked or b"").split(b"\0")))
    for name in names:
        digest.update(b"\0" + name + b"\0")
        digest.update(_contents(root / os.fsdecode(name)))
    changed = bool(diff or names)
    return (commit.decode().strip() if commit else None), (digest.hexdigest() if changed else "")


def _contents(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b"unreadable"


def _packages() -> dict[str, str]:
    found = {
        distribution.metadata["Name"] or "": distribution.version
        for distribution in importlib.metadata.distributions()
    }
    return dict(sorted(found.items()))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
