"""Maintenance killed at every named place, by the program users start, and repeated."""

import os
import subprocess
import sys

import pytest
from maintenance_runs import contents, make_run

from hotpot.experience import open_run
from hotpot.experience.maintenance import compact, verify

VACUUM = ("vacuum", "--retention-hours", "0", "--keep-updates", "0")
DELETE = ("delete", "1.2.0", "--reason", "asked for")
PLACES = {
    "compact_before": ("compact",),
    "compact_written:3": ("compact",),
    "compact_after:3": ("compact",),
    "vacuum_before:2": VACUUM,
    "vacuum_after": VACUUM,
    "lake_before_events": DELETE,
    "delete_recorded": DELETE,
    "delete_before": DELETE,
    "delete_after:2": DELETE,
    "scrub_before": DELETE,
    "scrub_log": DELETE,
    "scrub_checkpoint": DELETE,
    "export_written": ("export",),
    "export_copied": ("export", "--copy"),
}


def hotpot(folder, arguments, crash_at=""):
    first, *rest = arguments
    words = [*rest, str(folder.parent / "copy")] if rest == ["--copy"] else rest
    command = [sys.executable, "-m", "hotpot.cli", "lake", first, str(folder), *words]
    done = subprocess.run(
        command, env={**os.environ, "HOTPOT_CRASH_AT": crash_at}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_killed_anywhere_and_repeated(tmp_path, place):
    folder = make_run(tmp_path / "runs" / "run", rounds=3)
    before = contents(open_run(folder))
    arguments = PLACES[place]
    if arguments[0] in ("vacuum", "delete"):
        compact(open_run(folder))
    code, said = hotpot(folder, arguments, crash_at=place)
    assert code == -9, said
    if arguments != DELETE:
        assert verify(open_run(folder)).good
    for _ in range(2 if arguments[-1] != "--copy" else 1):
        code, said = hotpot(folder, arguments)
        assert code == 0, said
    code, said = hotpot(folder, ("verify", "--deep"))
    assert code == 0, said
    after = contents(open_run(folder))
    if arguments == DELETE:
        assert len(after["steps"]) == len(before["steps"]) - 3
        assert after["consumptions"] == before["consumptions"]
    else:
        assert after == before
