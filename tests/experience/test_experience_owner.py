"""Whether a run folder has a living owner, and that asking gets in nobody's way."""

import fcntl
import os
import subprocess
import sys

import pytest

from hotpot.errors import RunFolderError
from hotpot.experience.run_folder import owner
from hotpot.experience.run_folder.owner import OwnerLock, is_owned


def test_a_folder_is_owned_while_its_lock_is_held(tmp_path):
    assert not is_owned(tmp_path)
    assert not list(tmp_path.iterdir())
    lock = OwnerLock(tmp_path)
    written = (tmp_path / "owner.lock").read_bytes()
    assert is_owned(tmp_path)
    lock.release()
    assert not is_owned(tmp_path)
    assert (tmp_path / "owner.lock").read_bytes() == written
    OwnerLock(tmp_path).release()


def test_a_process_that_was_killed_owns_nothing(tmp_path):
    script = (
        "import sys; from pathlib import Path; from hotpot.experience.run_folder.owner import OwnerLock\n"
        "lock = OwnerLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    assert is_owned(tmp_path)
    process.kill()
    process.communicate()
    assert not is_owned(tmp_path)


def test_a_question_asked_at_the_wrong_moment_keeps_no_owner_out(tmp_path, monkeypatch):
    OwnerLock(tmp_path).release()
    asking = os.open(tmp_path / "owner.lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr(owner.time, "sleep", lambda _: fcntl.flock(asking, fcntl.LOCK_UN))
    lock = OwnerLock(tmp_path)
    assert is_owned(tmp_path)
    lock.release()
    os.close(asking)


def test_a_lock_file_that_cannot_be_opened_is_said(tmp_path):
    (tmp_path / "owner.lock").symlink_to("owner.lock")
    with pytest.raises(RunFolderError, match="can't be opened"):
        is_owned(tmp_path)
