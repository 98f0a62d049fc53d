"""What a watchdog found, on disk: written as the last act of a process, read by whoever takes its run up.

::

    <run>/logs/watchdog.json        who it waited for                     <run>/logs/watchdog-stacks.txt   every thread
    <run>/logs/NAME.log             every thread of each child            <run>/logs/watchdog-N.json, ...  earlier ones

Owns the record and its files. Knows no thread and no clock.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotpot.errors import RunFolderError

_NATIVE = "native code that holds the interpreter's lock"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a watchdog ended a run: ``culprit`` is whom it waited for, ``where`` the function and line of Hotpot that its main
    thread was in, and, where it waits there for another thread of ours, that one. ``turning`` says whether the main loop
    still took turns; ``children`` names the run's other processes, which wrote their stacks into their own logs. Times in
    seconds.
    """

    culprit: str
    where: str
    spans: tuple[str, ...] = ()
    turning: bool = False
    silent_s: float = 0.0
    stop_after_s: float = 0.0
    pid: int = 0
    children: tuple[str, ...] = ()

    @property
    def event(self) -> tuple[str, dict[str, Any]]:
        """Kind and detail of the event that tells of it."""
        return "watchdog_ended", asdict(self)


def verdict_path(run_folder: Path) -> Path:
    """Return where the verdict of the latest process lies, if it had one."""
    return run_folder / "logs" / "watchdog.json"


def stacks_path(run_folder: Path) -> Path:
    """Return where every stack of the latest process lies, if its watchdog ended it."""
    return run_folder / "logs" / "watchdog-stacks.txt"


def write_verdict(run_folder: Path, verdict: Verdict) -> None:
    """Write ``verdict`` whole or not at all."""
    path = verdict_path(run_folder)
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(asdict(verdict), indent=1, sort_keys=True) + "\n")
    half.replace(path)


def read_verdict(run_folder: Path) -> Verdict | None:
    """Return what the watchdog of the latest process found; None where it ended otherwise.

    Where native code held the interpreter's lock there was nobody to write a verdict; one is made from the stacks.
    Raises :class:`RunFolderError` where the file is damaged.
    """
    path = verdict_path(run_folder)
    try:
        found = json.loads(path.read_text())
        return Verdict(**{**found, "spans": tuple(found["spans"]), "children": tuple(found["children"])})
    except FileNotFoundError:
        return _from_stacks(stacks_path(run_folder))
    except (ValueError, TypeError, KeyError) as error:
        raise RunFolderError(
            f"{path} is no verdict of a watchdog ({error}); move it away and try again"
        ) from error


def set_aside(run_folder: Path) -> None:
    """Keep what an earlier process's watchdog wrote under a number of its own, so that it is told once."""
    told = [path for path in (verdict_path(run_folder), stacks_path(run_folder)) if path.exists()]
    if not told:
        return
    logs = run_folder / "logs"
    number = 1 + len({path.stem.rpartition("-")[2] for path in logs.glob("watchdog*-[0-9]*")})
    for path in told:
        if path.stat().st_size:
            path.replace(path.with_stem(f"{path.stem}-{number}"))
        else:
            path.unlink()


def _from_stacks(path: Path) -> Verdict | None:
    text = path.read_text(errors="replace") if path.is_file() else ""
    frames = _FRAME.search(
        text.rpartition("\nThread ")[2]
    )  # the main thread comes last, its innermost frame first
    if not text:
        return None
    where = "" if frames is None else f"{frames['function']} ({Path(frames['file']).name}:{frames['line']})"
    return Verdict(culprit=_NATIVE, where=where)
