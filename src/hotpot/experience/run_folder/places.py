"""From what a user names (a run folder, or a lake and a run in it) to where a run's manifest, log and lake lie.

Owns the copy of a run's manifest in its lake, ``_runs/RUN_ID.json``: with it a lake can be read on a machine that has no
run folder, and by it a run id is taken in a lake: whose copy lies there owns the id. Knows no table. Invariant: what is
found by the run folder has log and ledger, what is found by the lake alone has neither.
"""

import contextlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from pyarrow import fs
from pydantic import ValidationError

from hotpot.config import S3Section
from hotpot.errors import RunFolderError, StoreError
from hotpot.experience.disk import sync_folder
from hotpot.experience.lake.lake import Lake
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.run_folder.manifest import (
    MANIFEST_NAME,
    Manifest,
    manifest_text,
    parse_manifest,
    read_manifest,
)

RUNS_FOLDER = "_runs"
"""Folder of a lake that holds the manifests of the runs in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Where a run lies. ``run_folder`` is None where only the lake is here: what was archived, not the log's tail."""

    run_folder: Path | None
    manifest: Manifest
    location: LakeLocation


def find_run(run: Path | str) -> RunPlace:
    """Return where a run lies: ``run`` is its folder, or ``LAKE#RUN_ID`` (``LAKE`` alone where it holds one run).

    ``LAKE`` is a folder or ``s3://bucket/prefix``; S3 settings of a lake named so come from the environment. Raises
    :class:`RunFolderError` where there is no such run, and :class:`StoreError` where the storage does not answer.
    """
    text = str(run)
    folder = Path(text)
    if (folder / MANIFEST_NAME).is_file():
        manifest = read_manifest(folder)
        return RunPlace(run_folder=folder, manifest=manifest, location=lake_location(folder, manifest))
    place, _, run_id = text.partition("#")
    if place.startswith("s3://") or (Path(place) / RUNS_FOLDER).is_dir():
        location = LakeLocation.of(place)
        return RunPlace(run_folder=None, manifest=_archived_manifest(location, run_id), location=location)
    if not folder.is_dir():
        raise RunFolderError(f"run folder {folder} does not exist; `hotpot runs` lists those there are")
    return RunPlace(run_folder=folder, manifest=read_manifest(folder), location=LakeLocation.of(folder))


def lake_location(run_folder: Path, manifest: Manifest) -> LakeLocation:
    """Return where the lake of a run lies, as its manifest says: by default in its folder, wherever that is now.

    Raises :class:`UsageError` where the manifest's words on it can't work.
    """
    if manifest.lake is None:
        return LakeLocation.of(run_folder / "lake")
    try:
        return LakeLocation.of(manifest.lake, S3Section.model_validate(manifest.s3))
    except ValidationError as error:
        raise RunFolderError(
            f"{run_folder / MANIFEST_NAME} can't say where the lake lies: {error}"
        ) from error


def check_unclaimed(location: LakeLocation, run_id: str) -> None:
    """Raise :class:`RunFolderError` where the lake holds a run of this id, :class:`StoreError` where it can't be read."""
    if _claim(location, run_id) is not None or Lake(location, writer=run_id).watermark():
        raise _taken(location, run_id)


def claim_run(location: LakeLocation, manifest: Manifest) -> None:
    """Take the run's id in the lake by a copy of its manifest there, unless this run has it already.

    Raises :class:`RunFolderError` where another run has it, and :class:`StoreError` where the storage fails. Of two runs
    that claim a folder's id at the same moment one is refused; S3 is asked again after writing, since Arrow can't write
    there on a condition.
    """
    found = _claim(location, manifest.run_id)
    if found is None:
        _write_claim(location, manifest)
        found = _claim(location, manifest.run_id)
    if found is None or _identity(found) != _identity(manifest):
        raise _taken(location, manifest.run_id)


def _identity(manifest: Manifest) -> tuple[int, str]:
    """What tells one start of a run from another, however often it is resumed or moved."""
    return manifest.created_us, manifest.host


def _taken(location: LakeLocation, run_id: str) -> RunFolderError:
    return RunFolderError(
        f"lake {location.uri} holds another run {run_id!r}, and an id names one run in a lake; choose another run id, "
        "or resume that run from its own folder"
    )


def _claim(location: LakeLocation, run_id: str) -> Manifest | None:
    files, base = location.filesystem()
    path = f"{base}/{RUNS_FOLDER}/{run_id}.json"
    try:
        if files.get_file_info(path).type == fs.FileType.NotFound:
            return None
        with files.open_input_stream(path) as stream:
            text = stream.read()
    except OSError as error:
        raise StoreError(f"can't read {path} of lake {location.uri}: {error}; check the storage") from error
    return parse_manifest(text.decode(), f"{location.uri}/{RUNS_FOLDER}/{run_id}.json")


def _write_claim(location: LakeLocation, manifest: Manifest) -> None:
    files, base = location.filesystem()
    path = f"{base}/{RUNS_FOLDER}/{manifest.run_id}.json"
    try:
        if location.is_local:
            _write_once(Path(path), manifest_text(manifest))
        else:
            with files.open_output_stream(path) as stream:
                stream.write(manifest_text(manifest).encode())
    except OSError as error:
        raise StoreError(f"can't write {path} of lake {location.uri}: {error}; check the storage") from error


def _write_once(path: Path, text: str) -> None:
    """Write a file durably and whole, unless there is one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename it takes no one's place
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    sync_folder(path.parent)
    sync_folder(path.parent.parent)


def _archived_manifest(location: LakeLocation, run_id: str) -> Manifest:
    files, base = location.filesystem()
    folder = f"{base}/{RUNS_FOLDER}"
    try:
        if not run_id:
            run_id = _only_run(files, folder, location)
        with files.open_input_stream(f"{folder}/{run_id}.json") as stream:
            text = stream.read()
    except FileNotFoundError as error:
        raise RunFolderError(
            f"lake {location.uri} holds no run {run_id!r}; it holds {_runs_in(files, folder) or 'none'}"
        ) from error
    except OSError as error:
        raise StoreError(f"can't read lake {location.uri}: {error}; check the storage, try again") from error
    return parse_manifest(text.decode(), f"{location.uri}/{RUNS_FOLDER}/{run_id}.json")


def _only_run(files: fs.FileSystem, folder: str, location: LakeLocation) -> str:
    found = _runs_in(files, folder)
    if len(found) != 1:
        raise RunFolderError(
            f"lake {location.uri} holds {len(found)} runs; name one as {location.uri}#RUN_ID: {', '.join(found[:20])}"
        )
    return found[0]


def runs_in(location: LakeLocation) -> list[str]:
    """Return the runs that have their manifest in the lake: all that ever began to write there, but for those of a lake
    made before runs could share one. Raises :class:`StoreError` where the storage does not answer."""
    files, base = location.filesystem()
    try:
        return _runs_in(files, f"{base}/{RUNS_FOLDER}")
    except OSError as error:
        raise StoreError(f"can't read lake {location.uri}: {error}; check the storage, try again") from error


def _runs_in(files: fs.FileSystem, folder: str) -> list[str]:
    selector = fs.FileSelector(folder, allow_not_found=True)
    names = [info.base_name for info in files.get_file_info(selector) if info.type == fs.FileType.File]
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))
