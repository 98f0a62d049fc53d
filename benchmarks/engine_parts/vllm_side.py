"""vLLM's side: ``vllm serve`` in its own environment, driven over HTTP with token ids, one connection an episode.

Sampled ids and their log-probabilities are asked for, since that is what learning needs and ours come with every token. The
sampling defaults of the model folder are not used; no token ends a generation. No request has a seed, which vLLM would pay for
with a generator of its own; ours are always reproducible.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

from engine_parts.work import Episode, EpisodeSizes, Text, episodes
from hotpot.models import PolicyTokenizer

WARM = 1_000_000
READY_S, ANSWER_S = 400, 900
NAME = "policy"


class VllmSide:
    """A running server with one of its settings: ``options`` of its command line, ``environment`` on top of ours."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        sizes: EpisodeSizes,
        log: Path,
        *,
        options: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.sizes, self.text, self.log = sizes, Text(PolicyTokenizer.load(folder)), log
        self.port = _free_port()
        command = [
            str(program), "serve", str(folder), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--max-model-len", str(sizes.longest + 1), "--enable-prefix-caching",
            "--generation-config", "vllm", *options,
        ]  # fmt: skip
        told = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **environment}
        for name in ("PYTHONPATH", "OMP_NUM_THREADS"):  # of this process, not of the server's
            if name not in environment:
                told.pop(name, None)
        self._output = log.open("w")
        self._process = subprocess.Popen(
            command, env=told, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def warm(self) -> None:
        """Answer the first step of each episode with a few tokens."""
        self._play(episodes(self.text, replace(self.sizes, steps=1, sampled=4), WARM))

    def round(self, number: int) -> float:
        """Play the round's episodes at once; return its seconds."""
        playing = episodes(self.text, self.sizes, number)
        started = time.perf_counter()
        self._play(playing)
        return time.perf_counter() - started

    def close(self) -> None:
        """End the server and what it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._output.close()

    def _play(self, playing: Sequence[Episode]) -> None:
        with ThreadPoolExecutor(len(playing)) as pool:
            for done in [pool.submit(self._episode, episode) for episode in playing]:
                done.result()

    def _episode(self, episode: Episode) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            while episode.take(self._answer(connection, episode)):
                pass
        finally:
            connection.close()

    def _answer(self, connection: HTTPConnection, episode: Episode) -> list[int]:
        asked = {
            "model": NAME,
            "prompt": episode.context,
            "max_tokens": episode.sampled,
            "temperature": 1.0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"vLLM answered {response.status}: {body[:300]!r}")
        (choice,) = json.loads(body)["choices"]
        tokens: list[int] = choice["token_ids"]
        assert len(choice["logprobs"]["token_logprobs"]) == len(tokens)
        return tokens

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self._process.returncode}, see {self.log}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise RuntimeError(f"vLLM was not ready within {READY_S} s, see {self.log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
