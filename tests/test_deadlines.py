"""Every call that can wait has a deadline, or stands here with the reason why it ends and who sees to that."""

from dataclasses import dataclass
from pathlib import Path

import pytest

import hotpot
from blocking_calls import blocking_calls

SOURCE = Path(hotpot.__file__).parent


@dataclass(frozen=True)
class Allowed:
    """A call without a deadline: why it ends all the same, and whose task that is."""

    file: str
    function: str
    call: str
    reason: str
    owner: str


ALLOWED = (
    Allowed(
        "engine/remote/calls.py", "Calls.close", "self._threads.shutdown",
        "each thread is in a request with a time-out, and the connections were shut the line before", "Asker",
    ),
    Allowed(
        "engine/remote/serving.py", "Serving._verify", "with ThreadPoolExecutor",
        "each probe is a request with a time-out and a bounded number of tries", "Asker",
    ),
    Allowed(
        "experience/reading/columns.py", "ColumnReader._map", "with ThreadPoolExecutor",
        "each read is of a local file, or of S3 with store.s3.deadline_s", "the lake's storage",
    ),
    Allowed(
        "rollout/actors/channel.py", "Channel.receive", "self.socket.recv",
        "the socket does not block: where there is nothing, it says so at once", "Channel",
    ),
    Allowed(
        "rollout/actors/crew.py", "Crew._work", "self._inbox.get",
        "a thread waits for its next call as long as its actor is there; then it is told to end", "Crew.dismiss",
    ),
    Allowed(
        "testing/killable.py", "_serve", "pipe.recv",
        "the next command may be long in coming; the pipe ends with the process that would send it", "KillableWriter",
    ),
    Allowed(
        "testing/pretrained.py", "smollm2_folder", "fcntl.flock",
        "another process imports the model, which takes a minute; its lock ends with it", "whoever imports",
    ),
    Allowed(
        "topology/learning/child.py", "_serve", "channel.recv",
        "the next update may be long in coming; the channel ends with the parent, and so does this process", "LearnerProcess",
    ),
)  # fmt: skip


def test_every_blocking_call_has_a_deadline_or_a_reason() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), one.function, one.call)
        for path in sorted(SOURCE.rglob("*.py"))
        for one in blocking_calls(path.read_text())
    }
    allowed = {(one.file, one.function, one.call) for one in ALLOWED}
    assert not found - allowed, "give it a time-out whose error names who is waited for"
    assert not allowed - found, "there is no such call any more"
    assert all(one.reason and one.owner for one in ALLOWED)


PLANTED = """
thread.join()
thread.join(None)
thread.join(timeout=None)
work.get()
event.wait()
process.wait()
future.result()
lock.acquire()
lock.acquire(True)
process.communicate()
process.communicate(b"input")
subprocess.run(["git"])
subprocess.check_output(["git"])
urlopen(url)
urllib.request.urlopen(url)
http.client.HTTPConnection(host, port)
socket.create_connection(address)
sqlite3.connect(path)
fcntl.flock(file, fcntl.LOCK_EX)
os.waitpid(pid, 0)
select.select(read, [], [])
selector.select()
listener.accept()
pipe.recv()
pipe.recv_bytes()
link.recv(4096)
futures.wait(jobs)
wait(jobs)
signal.pause()
input()
pool.shutdown()
self._threads.shutdown(wait=True)
"""


@pytest.mark.parametrize("line", PLANTED.split("\n")[1:-1])
def test_a_call_without_deadline_is_found_wherever_it_stands(line: str) -> None:
    inside = f"class A:\n    async def b(self):\n        def c():\n            return [{line} for _ in x]\n"
    assert len(blocking_calls(line)) == 1
    assert [one.function for one in blocking_calls(inside)] == ["A.b.c"]


BOUNDED = """
thread.join(5)
",".join(parts)
os.path.join(a, b)
mapping.get(key)
work.get(timeout=1.0)
work.get(False)
work.get_nowait()
event.wait(0.1)
lock.acquire(blocking=False)
lock.acquire(timeout=2)
future.result(5)
process.communicate(timeout=3)
process.communicate(b"", 3)
subprocess.run(["git"], timeout=20)
urlopen(url, timeout=3)
http.client.HTTPConnection(host, port, timeout=3)
socket.create_connection(address, timeout=3)
sqlite3.connect(":memory:")
sqlite3.connect(path, timeout=10.0)
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.flock(file, fcntl.LOCK_UN)
os.waitpid(pid, os.WNOHANG)
select.select(read, [], [], 1.0)
selector.select(0.5)
table.select(["a"])
pipe.poll(1.0) and pipe.recv()
link.settimeout(1.0) or link.recv(4096)
link.recv(1, socket.MSG_DONTWAIT)
try: link.recv(4096) ⏎except BlockingIOError: pass
futures.wait(jobs, timeout=1)
link.shutdown(socket.SHUT_RDWR)
pool.shutdown(wait=False)
"""


@pytest.mark.parametrize("line", BOUNDED.split("\n")[1:-1])
def test_a_call_with_a_deadline_and_one_that_means_something_else_are_left_alone(line: str) -> None:
    assert blocking_calls(line.replace("⏎", "\n")) == []


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("with self._lock:\n    thread.join(5)", "self._lock: thread.join"),
        ("with self._guard:\n    time.sleep(1)", "self._guard: time.sleep"),
        ("with ThreadPoolExecutor(2) as pool:\n    pass", "with ThreadPoolExecutor"),
    ],
)
def test_nobody_waits_while_holding_a_lock_or_for_a_pool(source: str, call: str) -> None:
    assert [one.call.removeprefix("with ") for one in blocking_calls(source)] == [call.removeprefix("with ")]


def test_a_lock_may_be_held_for_work() -> None:
    assert blocking_calls("with self._lock:\n    self.count += 1\n    ', '.join(names)") == []
