import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from hotpot.errors import RunFolderError
from hotpot.experience import Redactor
from hotpot.experience.run_folder.manifest import (
    DIFF_BYTES,
    HASHED_BYTES,
    collect_manifest,
    read_manifest,
    write_manifest,
)
from hotpot.experience.run_folder.owner import OwnerLock


def collect(**keywords):
    return collect_manifest(**{"run_id": "run", "recipe": '{"a":1}', "seed": 3, "num_threads": 2} | keywords)


def git(folder, *arguments):
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


def test_it_comes_back_as_written(tmp_path):
    manifest = collect()
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert manifest.packages["numpy"]
    assert manifest.num_cpus >= 1
    assert manifest.memory_bytes > 0


def test_the_code_is_told_by_commit_and_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (collect().commit, collect().diff_hash) == (None, None)
    git(tmp_path, "init")
    assert (collect().commit, collect().diff_hash) == (None, "")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    clean = collect()
    assert len(clean.commit) == 40
    assert clean.diff_hash == ""
    (tmp_path / "a.py").write_text("2")
    changed = collect().diff_hash
    (tmp_path / "new.py").write_text("3")
    added = collect().diff_hash
    (tmp_path / "new.py").write_text("4")
    assert len({"", changed, added, collect().diff_hash}) == 4
    assert collect().commit == clean.commit


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    git(folder, "init")
    (folder / "a.py").write_text("one = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "one")
    return folder


def test_the_changes_are_kept_as_text_without_secrets(repository):
    assert (collect().diff, collect().diff_hash) == ("", "")
    (repository / "a.py").write_text("one = 2\npassword = 'hunter2'\n")
    (repository / "new.py").write_text("3")
    manifest = collect()
    assert "-one = 1\n+one = 2\n" in manifest.diff
    assert f"untracked new.py {hashlib.sha256(b'3').hexdigest()}\n" in manifest.diff
    assert "hunter2" not in manifest.diff
    assert "password = [redacted:password]" in manifest.diff
    (repository / "a.py").write_text("".join(f"line = {number}\n" for number in range(40_000)))
    manifest = collect()
    assert len(manifest.diff) < DIFF_BYTES + 100
    assert re.search(r"\+line = \d+\n\[cut: \d+ of \d+ bytes\]\n$", manifest.diff)
    assert manifest.diff_hash != hashlib.sha256(manifest.diff.encode()).hexdigest()


@pytest.mark.parametrize("place", ["runs/new", "new"])
def test_the_runs_own_files_are_no_change_of_the_code(repository, place):
    folder = repository / place
    folder.mkdir(parents=True)
    (folder / "owner.lock").write_text("process 1")
    if place == "runs/new":
        (repository / "runs" / "old").mkdir()
        (repository / "runs" / "old" / "trace.json").write_text("x")
    assert collect(run_folder=folder).diff == ""
    (repository / "b.py").write_text("x")
    assert collect(run_folder=folder).diff.startswith("untracked b.py ")


def test_large_and_odd_untracked_files_are_not_read(repository, monkeypatch):
    with (repository / "model.bin").open("wb") as file:
        file.truncate(HASHED_BYTES + 1)
    (repository / "zero").symlink_to("/dev/zero")
    first = collect()
    assert f"untracked model.bin {HASHED_BYTES + 1} bytes, modified " in first.diff
    assert "untracked zero link to /dev/zero\n" in first.diff
    os.utime(repository / "model.bin", ns=(1, 1))
    assert collect().diff_hash != first.diff_hash


def test_recipe_and_command_are_kept_without_secrets(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hotpot", "train", "--set", "environment.params.api_key=abc"])
    recipe = '{"environment":{"params":{"api_key":"abc","size":3}},"store":{"redact_patterns":["abc"]}}'
    manifest = collect(recipe=recipe, redactor=Redactor(["abc"]))
    assert manifest.command[-1] == "environment.params.api_key=[redacted:password]"
    assert json.loads(manifest.recipe) == {
        "environment": {"params": {"api_key": "[redacted:password]", "size": 3}},
        "store": {"redact_patterns": ["abc"]},
    }


def test_no_git_is_no_error(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert collect().commit is None


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(RunFolderError, match="no run folder"):
        read_manifest(tmp_path)
    for text in ("", "{", "[]", "{}", '{"run_id": 1}'):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(RunFolderError, match="can't read"):
            read_manifest(tmp_path)
    with pytest.raises(RunFolderError, match="can't write"):
        write_manifest(tmp_path / "missing", collect())


def test_a_manifest_of_a_later_release_with_more_in_it_is_read(tmp_path):
    values = {**dataclasses.asdict(collect()), "weather": "fine"}
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    assert read_manifest(tmp_path).seed == 3


def test_the_lock_is_let_go_and_does_not_live_on_in_children(tmp_path):
    lock = OwnerLock(tmp_path)
    with pytest.raises(RunFolderError, match="one writer"):
        OwnerLock(tmp_path)
    sleeper = subprocess.Popen(["sleep", "30"], close_fds=False)
    lock.release()
    lock.release()
    again = OwnerLock(tmp_path)
    again.release()
    sleeper.kill()
    sleeper.wait()


def test_a_forked_child_does_not_hold_the_lock_of_a_parent_that_died(tmp_path):
    # A process takes the lock, forks a child that lives on, and dies without letting go.
    script = (
        "import os, sys, time; from pathlib import Path; from hotpot.experience.run_folder.owner import OwnerLock\n"
        "lock = OwnerLock(Path(sys.argv[1]))\n"
        "if os.fork() == 0:\n"
        "    print('child', os.getpid(), flush=True)\n"
        "    os.close(1); os.close(2)\n"
        "    time.sleep(100)\n"
        "    os._exit(0)\n"
        "sys.stdin.read(1)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(parent.stdout.readline().split()[1])
    with pytest.raises(RunFolderError, match="one writer"):
        OwnerLock(tmp_path)
    parent.communicate("x", timeout=20)
    os.kill(child, 0)  # it lives
    OwnerLock(tmp_path).release()
    os.kill(child, signal.SIGKILL)
