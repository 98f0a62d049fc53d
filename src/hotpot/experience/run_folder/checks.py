"""Checks before a run folder is written: is there one, may it be, and is it the run that is meant.

Owns what counts as a folder that holds nothing yet. Writes no record.
"""

import os
from pathlib import Path

from hotpot.config import StoreSection
from hotpot.errors import RunFolderError
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.run_folder.manifest import (
    MANIFEST_DRAFT,
    MANIFEST_NAME,
    Manifest,
    check_readable,
    read_manifest,
)
from hotpot.experience.run_folder.places import lake_location

# What a process killed before it wrote its manifest leaves: nothing worth keeping.
_BARE = frozenset({"owner.lock", MANIFEST_DRAFT})


def prepare_folder(run_folder: Path, *, resume: bool) -> None:
    """Make the folder of a new run, or check that there is one to resume. Raises :class:`RunFolderError`."""
    if resume:
        if not run_folder.is_dir():
            raise RunFolderError(
                f"{run_folder} does not exist, so there is nothing to resume; check the name"
            )
    else:
        try:
            run_folder.mkdir(parents=True, exist_ok=True)
            used = any(entry.name not in _BARE for entry in run_folder.iterdir())
        except OSError as error:
            raise RunFolderError(
                f"can't create run folder {run_folder}: {error}; check the path and rights"
            ) from error
        if used:
            raise RunFolderError(
                f"{run_folder} exists and is not empty; choose another run id, or resume the run that is in it"
            )
    if not os.access(run_folder, os.W_OK | os.X_OK):
        raise RunFolderError(
            f"run folder {run_folder} can't be written; check rights, or choose another folder"
        )


def chosen_location(run_folder: Path, settings: StoreSection) -> LakeLocation:
    """Return where a recipe wants the lake: by default in the run folder."""
    return LakeLocation.of(settings.lake or run_folder / "lake", settings.s3)


def checked_manifest(run_folder: Path, run_id: str, settings: StoreSection) -> Manifest:
    """Return the manifest of the run to resume.

    Raises :class:`RunFolderError` where it is of another run or schema, or its lake lies elsewhere than the settings say.
    """
    manifest = read_manifest(run_folder)
    if manifest.run_id != run_id:
        raise RunFolderError(
            f"{run_folder / MANIFEST_NAME} belongs to run {manifest.run_id!r}, not {run_id!r}; name that run"
        )
    check_readable(run_folder, manifest)
    known, wanted = lake_location(run_folder, manifest), chosen_location(run_folder, settings)
    if known.uri != wanted.uri:
        raise RunFolderError(
            f"the lake of {run_folder} lies at {known.uri}, store.lake says {wanted.uri}; resume with the run's own recipe"
        )
    return manifest
