"""The manifest of a run: what it was started with, and on what. Written atomically, once for each schema version.

Owns ``manifest.json``. Collects code, packages, hardware and threads by itself; the recipe comes from the caller as
JSON text. Knows no table. A missing git, repository or commit is None, never an error.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import stat
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hotpot.errors import RunFolderError
from hotpot.experience.disk import sync_folder
from hotpot.experience.records.redact import Redactor
from hotpot.experience.records.upgrades import is_known
from hotpot.types import SCHEMA_VERSION

MANIFEST_NAME = "manifest.json"
MANIFEST_DRAFT = "manifest.json.draft"

HASHED_BYTES = 1024 * 1024
"""Size up to which an untracked file is told by its content; a larger one by size and time of its last change."""

DIFF_BYTES = 256 * 1024
"""Most of the uncommitted changes that is kept as text."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a run was started with.

    ``recipe`` is the resolved recipe as JSON text. ``commit`` is the user's commit. ``diff`` are the uncommitted changes:
    git's diff, then a line for each untracked file with its SHA-256, or with size and time of the last change where it
    is larger than :data:`HASHED_BYTES`; files in the folder of the runs are none of them. It is kept up to
    :data:`DIFF_BYTES` and ends with a line that says so where that cut it; ``diff_hash`` is the SHA-256 of all of it.
    Both are empty where nothing is changed, and all three None outside a repository. Secrets in recipe, command and
    diff are replaced, but for the recipe's own ``redact_patterns``, which a resume needs. ``packages`` maps distributions to versions, ``thread_variables`` environment variables to values.
    ``lake`` is where the lake lies, None for ``lake`` in the run folder; ``s3`` are the settings (no credentials) of one
    on S3.
    ``schema_version`` is the one the run is written under now, ``schema_versions`` all it was ever written under, ascending.
    ``vocabulary_size`` is None where a release wrote it that did not keep it.
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
    diff: str | None = None
    lake: str | None = None
    s3: dict[str, Any] = field(default_factory=dict)
    schema_versions: tuple[int, ...] = ()
    vocabulary_size: int | None = None


def collect_manifest(
    *,
    run_id: str,
    recipe: str,
    seed: int,
    num_threads: int,
    run_folder: Path | None = None,
    redactor: Redactor | None = None,
    lake: str | None = None,
    s3: dict[str, Any] | None = None,
    vocabulary_size: int | None = None,
) -> Manifest:
    """Return the manifest of a run that starts now, in this process and working folder.

    ``run_folder`` says where the run is written, which is no change of the code; ``lake`` and ``s3`` where its lake
    lies, unless in that folder.
    """
    here = Path.cwd()
    cleaner = redactor or Redactor()
    code = _code_state(here, run_folder)
    return Manifest(
        run_id=run_id,
        schema_version=SCHEMA_VERSION,
        created_us=time.time_ns() // 1_000,
        seed=seed,
        num_threads=num_threads,
        recipe=cleaner.redact_json(recipe, leave=("redact_patterns",))[0],
        command=cleaner.redact_arguments(sys.argv),
        working_folder=str(here),
        commit=code.commit,
        diff_hash=code.diff_hash,
        diff=None if code.diff is None else cleaner.redact(code.diff)[0],
        python=platform.python_version(),
        platform=platform.platform(),
        host=platform.node(),
        cpu=_cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        packages=_packages(),
        thread_variables={name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        lake=lake,
        s3=s3 or {},
        schema_versions=(SCHEMA_VERSION,),
        vocabulary_size=vocabulary_size,
    )


def write_manifest(run_folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically: a reader sees all of it or none. Raises :class:`RunFolderError` if it can't."""
    path, draft = run_folder / MANIFEST_NAME, run_folder / MANIFEST_DRAFT
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(manifest_text(manifest))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(run_folder)
    except OSError as error:
        raise RunFolderError(f"can't write {path}: {error}; check space and rights") from error


def manifest_text(manifest: Manifest) -> str:
    """Return the manifest as it is written."""
    return json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n"


def check_readable(run_folder: Path, manifest: Manifest) -> None:
    """Raise :class:`RunFolderError` where the run is of a schema version that this release can't read."""
    if not is_known(manifest.schema_version):
        raise RunFolderError(
            f"{run_folder} keeps schema version {manifest.schema_version}, this release reads {SCHEMA_VERSION} and "
            "those before it; use the release that wrote it, or a newer one"
        )


def take_over(run_folder: Path, manifest: Manifest) -> Manifest:
    """Say in the manifest, before anything else is written, that the run goes on under this release's schema version.

    Raises :class:`RunFolderError` where it can't be written.
    """
    if manifest.schema_version != SCHEMA_VERSION:
        versions = (*manifest.schema_versions, SCHEMA_VERSION)
        manifest = replace(manifest, schema_version=SCHEMA_VERSION, schema_versions=versions)
        write_manifest(run_folder, manifest)
    return manifest


def read_manifest(run_folder: Path) -> Manifest:
    """Return the manifest of a run folder. Raises :class:`RunFolderError` where it is missing or not readable."""
    path = run_folder / MANIFEST_NAME
    try:
        return parse_manifest(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise RunFolderError(
            f"{run_folder} is no run folder: it has no {MANIFEST_NAME}; `hotpot runs` lists runs"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"can't read {path}: {error!r}; restore it from a copy") from error


def parse_manifest(text: str, origin: str) -> Manifest:
    """Return the manifest in ``text``, read from ``origin``. Raises :class:`RunFolderError` where it is none."""
    try:
        values: dict[str, Any] = json.loads(text)
        known = {one.name for one in fields(Manifest)}
        values = {name: value for name, value in values.items() if name in known}
        values["command"] = tuple(values["command"])
        values["schema_versions"] = tuple(values.get("schema_versions") or [values["schema_version"]])
        return Manifest(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"can't read {origin}: {error!r}; restore it from a copy") from error


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """What version control says of the working folder; all None outside of it."""

    commit: str | None = None
    diff_hash: str | None = None
    diff: str | None = None


def _code_state(folder: Path, run_folder: Path | None) -> _Code:
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        return _Code()
    root = Path(os.fsdecode(top.removesuffix(b"\n")))
    commit = _git(root, "rev-parse", "HEAD")
    # Without --binary a changed binary file is its hash, not its bytes.
    changes = b""
    if commit is not None:
        changes = _git(root, "diff", "HEAD", "--full-index", "--no-color", "--no-ext-diff") or b""
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or b""
    names = sorted(filter(None, listed.split(b"\0")))
    own = _own_files(root, run_folder)
    untracked = [
        b"untracked " + name + b" " + _state_of(root / os.fsdecode(name)) + b"\n"
        for name in names
        if own is None or not (root / os.fsdecode(name)).is_relative_to(own)
    ]
    diff = changes + b"".join(untracked)
    return _Code(
        commit=commit.decode().strip() if commit else None,
        diff_hash=hashlib.sha256(diff).hexdigest() if diff else "",
        diff=_bounded(diff),
    )


def _own_files(root: Path, run_folder: Path | None) -> Path | None:
    """Return the folder whose untracked files are runs, not code: the run folder's parent, unless all code is in it."""
    if run_folder is None:
        return None
    real = run_folder.resolve()
    return real if root.resolve().is_relative_to(real.parent) else real.parent


def _state_of(path: Path) -> bytes:
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            return b"link to " + os.fsencode(path.readlink())
        if not stat.S_ISREG(found.st_mode) or found.st_size > HASHED_BYTES:
            return f"{found.st_size} bytes, modified {found.st_mtime_ns}".encode()
        return hashlib.sha256(path.read_bytes()).hexdigest().encode()
    except OSError:
        return b"unreadable"


def _bounded(diff: bytes) -> str:
    kept = diff if len(diff) <= DIFF_BYTES else diff[: diff.rfind(b"\n", 0, DIFF_BYTES) + 1]
    cut = f"[cut: {len(diff) - len(kept)} of {len(diff)} bytes]\n" if len(kept) < len(diff) else ""
    return kept.decode(errors="replace") + cut


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
