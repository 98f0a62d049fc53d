"""From what the user typed to a run folder, its manifest and its records."""

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotpot.errors import RunFolderError

if TYPE_CHECKING:
    from hotpot.experience import RunReader

MANIFEST = "manifest.json"
SUMMARY = "summary.json"

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run: its folder, or its id under --runs.")]
RunsOption = Annotated[
    Path, typer.Option("--runs", metavar="FOLDER", help="Folder that holds the run folders.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_RUNS = Path("runs")


def find_run(text: str, runs: Path = DEFAULT_RUNS) -> Path:
    """Return the folder of the run that ``text`` names: a path, or an id under ``runs``.

    Raises
    ------
    RunFolderError: there is no such run; names the nearest.
    """
    for folder in (Path(text), runs / text):
        if (folder / MANIFEST).is_file():
            return folder
    known = [folder.name for folder in list_runs(runs)]
    near = get_close_matches(text, known, n=3, cutoff=0.4)
    if near:
        hint = f"nearest: {', '.join(near)}"
    else:
        hint = f"`hotpot runs --runs {runs}` lists them" if known else f"there are no runs under {runs}"
    if Path(text).is_dir():
        raise RunFolderError(f"{text} is no run folder: it has no {MANIFEST}; {hint}")
    raise RunFolderError(f"no run {text!r}, neither as a folder nor under {runs}; {hint}")


def list_runs(runs: Path) -> Iterator[Path]:
    """Yield the run folders under ``runs``, oldest manifest first."""
    found = [path.parent for path in runs.glob(f"*/{MANIFEST}")]
    yield from sorted(found, key=lambda folder: ((folder / MANIFEST).stat().st_mtime_ns, folder.name))


def read_manifest(run: Path) -> dict[str, Any]:
    """Return the run's manifest, its recipe as a table.

    Raises
    ------
    RunFolderError: it is no JSON object.
    """
    found = _read_object(run / MANIFEST)
    if isinstance(found.get("recipe"), str):
        try:
            found["recipe"] = json.loads(found["recipe"])
        except ValueError as error:
            raise RunFolderError(
                f"{run / MANIFEST} holds a recipe that is no JSON; restore it from a copy"
            ) from error
    return found


def read_summary(run: Path) -> dict[str, Any] | None:
    """Return the run's summary, or None where it has none (yet).

    Raises
    ------
    RunFolderError: it is no JSON object.
    """
    path = run / SUMMARY
    return _read_object(path) if path.is_file() else None


def open_reader(run: Path) -> "RunReader":
    """Return a reader over the run's records."""
    from hotpot.experience import RunReader

    return RunReader.open(run)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); the run folder is damaged") from error
    if not isinstance(found, dict):
        raise RunFolderError(f"{path} holds no JSON object; the run folder is damaged")
    return found


def read_recipe(run: Path) -> dict[str, Any] | None:
    """Return the settings a run was told last: recipe.json, or where there is none the recipe of its manifest."""
    told = run / "recipe.json"
    if told.is_file():
        found: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
        return found
    stored = read_manifest(run).get("recipe")
    return stored if isinstance(stored, dict) else None
