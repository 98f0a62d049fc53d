"""Learning in a process of its own: the bits of the learner in this one, and an end to whatever that process does."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from learning_cases import make_work

from hotpot.errors import LearnerError, ModelFilesError
from hotpot.learner import NonFiniteError
from hotpot.models import checksum
from hotpot.topology.learning import process
from hotpot.topology.learning.inline import InlineLearning
from hotpot.topology.learning.process import LOG, LearnerProcess
from hotpot.topology.learning.protocol import Learned
from hotpot.topology.parts.ingredients import model_files, read_model
from hotpot.topology.parts.learners import make_learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG_S = 240.0
"""Longest wait for what must come: a machine may be busy."""

CRITIC = ("learner.advantages=gae", "learner.critic=separate")

BREAK = "import hotpot.experience.crashpoints as c, os, time; c.reach = lambda name: {} if name == {!r} else None; "


IMPORTS_FOR_EVER = (
    "import sys, time; child = 'hotpot.topology.learning.child'; "
    "find = lambda self, name, *_: time.sleep(10000) if name == child else None; "
    "sys.meta_path.insert(0, type('Lazy', (), {'find_spec': find})()); "
)


@pytest.fixture
def begin(recipe, tmp_path) -> Iterator[Callable[..., LearnerProcess]]:
    """Return a way to start the process of a recipe with overrides; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(*overrides: str, **more) -> LearnerProcess:
            made = LearnerProcess(recipe(*overrides), run=tmp_path / "run", num_threads=1, **more)
            stack.callback(made.close)
            return made

        yield start


def fault(monkeypatch: pytest.MonkeyPatch, place: str, what: str) -> None:
    """Let processes do ``what`` where they reach ``place``."""
    monkeypatch.setattr(process, "_CODE", BREAK.format(what, place) + process._CODE)


def taken(learning: LearnerProcess) -> Learned:
    found = learning.poll(LONG_S)
    assert isinstance(found, Learned)
    return found


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("run.deterministic=false", *CRITIC),
        ("run.deterministic=false", "learner.lora_rank=2", "learner.kl_coefficient=0.1"),
        ("learner.kl_coefficient=0.1", "learner.kl_in=reward", *CRITIC),
        (
            "run.deterministic=false", "learner.precision=bfloat16", "learner.old_logprobs=recomputed",
            "model.implementation=transformers",
            "learner.advantages=gae", "learner.critic=head",
        ),
    ],
)  # fmt: skip
def test_it_learns_bit_for_bit_what_is_learned_inline_also_from_its_checkpoint(
    overrides, begin, recipe, tmp_path
) -> None:
    made = read_model(recipe(*overrides))
    inline = InlineLearning(make_learner(recipe(*overrides), made, None), num_threads=1)
    apart, again = begin(*overrides), None
    files = model_files(made.tokenizer, made.dialect)
    for update in (1, 2, 3):
        work = make_work(update)
        for learning in (inline, apart, *([again] if again else [])):
            learning.begin(work)
            assert learning.busy
        here = inline.poll()
        assert isinstance(here, Learned)
        for learning in (apart, *([again] if again else [])):
            there = taken(learning)
            assert there.result.batch_hash == here.result.batch_hash
            np.testing.assert_array_equal(there.result.losses, here.result.losses)
            assert there.result.terms == here.result.terms
            assert [step.hash for step in there.result.steps] == [step.hash for step in here.result.steps]
            assert there.checksum == here.checksum == checksum(learning.weights())
        if update == 1:
            folder = tmp_path / "update-000001"
            folder.mkdir()
            apart.begin_save(folder, files, {"update": 1})
            assert apart.poll(LONG_S) == folder
            again = begin(*overrides, source=folder, first=recipe().model.path)


def test_weights_stay_until_the_update_after_the_next_one_is_begun(begin) -> None:
    learning = begin()
    with pytest.raises(LearnerError, match="no update was learned"):
        learning.weights()
    assert learning.poll(LONG_S) is None  # it has nothing to do, so nothing is waited for
    count, last = learning.beat()
    seen = []
    for update in (1, 2, 3):
        learning.begin(make_work(update))
        with pytest.raises(LearnerError, match=f"while it was in update {update}"):
            learning.begin(make_work(9))
        if seen:
            before, served = seen[-1]
            until(lambda: bool(_ready(learning)))  # learned, and not taken yet
            assert checksum(served) == before
            assert learning.weights() is served
        seen.append((taken(learning).checksum, learning.weights()))
        assert learning.beat()[0] >= count + 4  # begun, two steps of one pass at least, ended
        assert learning.beat()[1] > last
        count, last = learning.beat()
    learning.close()
    before, served = seen[-1]
    assert checksum(served) == before  # what was taken outlives the process


def test_what_the_learner_raises_arrives_as_itself_and_it_goes_on(begin) -> None:
    learning = begin("learner.max_skipped_in_a_row=1")
    learning.begin(dataclasses.replace(make_work(1), sequences=[]))
    with pytest.raises(LearnerError, match="no sequences") as caught:
        learning.poll(LONG_S)
    assert "learner.py" in caught.value.__notes__[0]
    work = make_work(1)
    first = work.sequences[0]
    unknown = np.where(first.loss_mask, np.nan, 0).astype(np.float32)
    bad = dataclasses.replace(first, behaviour_logprobs=unknown)
    learning.begin(dataclasses.replace(work, sequences=[bad, *work.sequences[1:]]))
    with pytest.raises(NonFiniteError) as failed:
        learning.poll(LONG_S)
    assert failed.value.result.steps[-1].finding is not None
    learning.begin_save(Path("/proc/nowhere"), {}, {})
    with pytest.raises(OSError, match="nowhere"):
        learning.poll(LONG_S)
    learning.begin(make_work(2))
    taken(learning)


def test_a_checkpoint_that_is_none_is_refused_as_it_is_here(begin, tmp_path, recipe) -> None:
    learning = begin(source=recipe().model.path)
    learning.begin(make_work(1))
    with pytest.raises(ModelFilesError, match=r"learner\.json"):
        learning.poll(LONG_S)
    with pytest.raises(LearnerError, match="ended with exit code 0"):
        until(lambda: learning.poll() is not None)


@pytest.mark.parametrize(
    ("place", "what", "says"),
    [
        ("learning_began", "os._exit(7)", "exit code 7 in update 1"),
        ("learning_ended", "os.kill(os.getpid(), 9)", r"signal 9 \(SIGKILL\) in update 1"),
        ("learner_answers", "1 / 0", "exit code 1 in update 1;.*ZeroDivisionError"),
    ],
)
def test_its_death_is_raised_with_what_it_said(place, what, says, begin, monkeypatch) -> None:
    fault(monkeypatch, place, what)
    learning = begin()
    learning.begin(make_work(1))
    with pytest.raises(LearnerError, match=f"(?s){says}"):
        learning.poll(LONG_S)
    with pytest.raises(LearnerError, match=says.split(" in")[0]):
        learning.poll()


def test_named_places_kill_it_by_the_environment_and_a_segmentation_fault_leaves_its_stack(
    begin, monkeypatch
) -> None:
    monkeypatch.setenv("HOTPOT_CRASH_AT", "weights_written:2")
    learning = begin()
    learning.begin(make_work(1))
    taken(learning)
    learning.begin(make_work(2))
    with pytest.raises(LearnerError, match=r"SIGKILL.*in update 2"):
        learning.poll(LONG_S)
    other = begin()
    other.begin(make_work(1))
    taken(other)
    os.kill(other.pid, signal.SIGSEGV)
    with pytest.raises(LearnerError, match=r"(?s)SIGSEGV.*Fatal Python error"):
        until(lambda: other.poll(0.1) is not None)
    with pytest.raises(LearnerError, match="SIGSEGV"):
        other.begin(make_work(2))


@pytest.mark.parametrize("where", ["building", "saving"])
def test_what_is_done_in_one_piece_counts_as_progress_no_longer_than_the_run_may_stand_still(
    begin, monkeypatch, tmp_path, where: str
) -> None:
    if where == "building":
        monkeypatch.setattr(process, "_CODE", IMPORTS_FOR_EVER + process._CODE)
    else:
        fault(monkeypatch, "checkpoint_weights", "time.sleep(10000)")
    learning = begin("supervision.beat_s=0.1", "supervision.dead_after_s=1", "supervision.stop_after_s=5")
    if where == "saving":
        until(lambda: learning._progress.read()[0] > 0)  # built
        (tmp_path / "update-000001").mkdir()
        learning.begin_save(tmp_path / "update-000001", {}, {"update": 1})
    assert learning.beat()[0] < learning.beat()[0]
    until(lambda: (before := learning.beat()) == learning.beat() and before[0] > 0)
    count = learning.beat()
    time.sleep(0.2)
    assert learning.beat() == count


def test_one_that_hangs_stops_beating_and_is_killed_with_its_stacks_in_the_log(
    begin, monkeypatch, tmp_path
) -> None:
    fault(monkeypatch, "learning_ended", "time.sleep(10000)")
    learning = begin()
    learning.begin(make_work(1))
    until(lambda: learning._progress.read()[0] > 2)  # built, and at work

    def silent() -> bool:
        before = learning.beat()
        assert learning.poll(0.5) is None
        return learning.beat() == before

    until(silent)
    began = time.monotonic()
    learning.close()
    assert time.monotonic() - began < 30
    assert not Path(f"/proc/{learning.pid}").exists()
    assert "_learn" in (tmp_path / "run" / LOG).read_text()
    with pytest.raises(LearnerError, match="closed"):
        learning.poll()
    learning.close()


def test_signals_that_ask_the_run_to_end_do_not_end_it(begin) -> None:
    learning = begin()
    learning.begin(make_work(1))
    for wish in (signal.SIGINT, signal.SIGTERM):
        os.kill(learning.pid, wish)
    taken(learning)


PARENT = """
import sys, time
from learning_cases import make_work
from hotpot.config import Recipe
from hotpot.topology.learning import process
from pathlib import Path
if sys.argv[3]:
    process._CODE = sys.argv[3] + process._CODE
recipe = Recipe.model_validate_json(Path(sys.argv[1]).read_text(), strict=True)
learning = process.LearnerProcess(recipe, run=Path(sys.argv[2]), num_threads=1)
learning.begin(make_work(1))
if sys.argv[3]:
    while learning._progress.read()[0] == 0:  # not built yet
        time.sleep(0.01)
    time.sleep(0.5)
else:
    learning.poll(120)
print(learning.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("hang", ["", BREAK.format("time.sleep(10000)", "learning_began")])
def test_it_ends_when_its_parent_is_killed(hang, recipe, tmp_path) -> None:
    (tmp_path / "recipe").write_text(recipe().model_dump_json())
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "recipe"), str(tmp_path), hang],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: not _lives(child))


def _lives(pid: int) -> bool:
    """Return whether a process of that id runs; one that nobody has buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _ready(learning: LearnerProcess) -> bool:
    """Return whether there is something to take, without taking it."""
    with contextlib.suppress(BlockingIOError):
        return bool(learning._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False
