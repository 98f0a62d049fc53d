"""Servers as hosts of weights: are they there, can they take a folder, do they say what they serve.

Owns the control calls of each make: vLLM's reinforcement-learning endpoints (development mode), SGLang's update from disk,
and nothing for a server whose weights are fixed. Knows no requests and believes no success: whoever puts weights on a host
verifies them with probes.

On vLLM's CPU build a folder is loaded by ``/collective_rpc reload_weights``, in place, in milliseconds: its weight transfer
engines (NCCL, CUDA IPC) need GPUs.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hotpot.engine.remote.http import Http, Reply
from hotpot.engine.remote.process import ServerProcess
from hotpot.errors import EngineError

_CONTROL_S = 120.0
_HEALTH_S = 5.0
_RESETS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an engine is, for its reports. ``num_threads`` 0: the server does not say. ``cache_tokens``: what its key/value
    cache holds, None where it does not say.
    """

    engine: str
    precision: str
    device: str
    num_threads: int
    cache_tokens: int | None = None


class Host(Protocol):
    """A server that weights can be put on."""

    facts: Facts
    takes_weights: bool

    def revive(self, folder: Path) -> None:
        """Return once the server answers; start it (again), with ``folder``, where it is ours. Raises :class:`EngineError`."""

    def put(self, folder: Path, label: str, *, keep: bool) -> None:
        """Let the server load ``folder``; ``keep``: requests under way go on with it. Raises :class:`EngineError`."""

    def label(self) -> str | None:
        """Return the name of the weights that the server says it serves; None where it says nothing."""

    def close(self) -> None:
        """End the server where it is ours."""


class FixedHost:
    """A server whose weights nobody changes."""

    takes_weights = False

    def __init__(self, http: Http, facts: Facts, *, health: str = "/v1/models", wait_s: float = 60.0) -> None:
        self.facts = facts
        self._http = http
        self._health = health
        self._wait_s = wait_s

    def revive(self, folder: Path) -> None:
        """Wait until the server answers."""
        del folder
        wait_healthy(self._http, self._health, self._wait_s)

    def put(self, folder: Path, label: str, *, keep: bool) -> None:
        """Refuse."""
        del label, keep
        raise EngineError(
            f"the server at {self._http.url} takes no weights, so {folder.name} can't be served; set engine.weights to what it "
            "understands, or use engine.kind = 'vllm'"
        )

    def label(self) -> str | None:
        """Return None: it says nothing."""
        return None

    def close(self) -> None:
        """Leave the server as it is."""


class SglangHost(FixedHost):
    """SGLang: ``/update_weights_from_disk``. Written to its documentation, not run here."""

    takes_weights = True

    def put(self, folder: Path, label: str, *, keep: bool) -> None:
        """Let it load ``folder`` and drop its prefix cache."""
        del label, keep
        body = {"model_path": str(folder), "flush_cache": True}
        done = control(self._http, "/update_weights_from_disk", body)
        if not (isinstance(done, dict) and done.get("success")):
            raise EngineError(f"{self._http.url}/update_weights_from_disk says {done}")


class VllmHost:
    """vLLM in development mode (``VLLM_SERVER_DEV_MODE=1``), ours where ``process`` is given."""

    takes_weights = True

    def __init__(
        self, http: Http, facts: Facts, process: ServerProcess | None, *, wait_s: float, labels: bool
    ) -> None:
        self.facts = facts
        self._http = http
        self.process = process
        self._wait_s = wait_s
        self._labels = labels

    def revive(self, folder: Path) -> None:
        """Wait until it answers; where it is ours and does not, start it with ``folder``."""
        if self.process is None:
            wait_healthy(self._http, "/health", self._wait_s)
        elif self.process.exit_code() is not None or not healthy(self._http, "/health", _HEALTH_S):
            self.process.start(folder)
            wait_healthy(self._http, "/health", self._wait_s, self.process)

    def put(self, folder: Path, label: str, *, keep: bool) -> None:
        """Pause, load, drop the prefix cache, name the weights, and go on whatever came of it."""
        control(self._http, f"/pause?mode={'keep' if keep else 'wait'}", {})
        try:
            kwargs = {"weights_path": str(folder)}
            control(self._http, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
            if (
                not keep
            ):  # blocks of requests that are kept can't be dropped; the salt keeps others away from them
                self._drop_cache()
            control(self._http, "/update_weight_version", {"new_version": label})
        finally:
            control(self._http, "/resume", {})

    def label(self) -> str | None:
        """Return the label of the weights it serves."""
        if not self._labels:
            return None
        found = asked(self._http, "/weight_info")
        return str(found.get("weight_version"))

    def close(self) -> None:
        """End the server where it is ours."""
        if self.process is not None:
            self.process.stop()
            self.process.log.unlink(missing_ok=True)

    def _drop_cache(self) -> None:
        for _ in range(_RESETS):
            done = control(self._http, "/reset_prefix_cache", {})
            if isinstance(done, dict) and done.get("success"):
                return
            time.sleep(0.02)
        raise EngineError(f"{self._http.url} does not drop its prefix cache: it says requests hold it")


def vllm_facts(http: Http, *, engine: str) -> Facts:
    """Return what a vLLM server says of itself.

    Raises :class:`EngineError` where it is not in development mode, or would report log-probabilities of another
    distribution than the one it samples from.
    """
    told = asked(http, "/server_info?config_format=json").get("vllm_config", {})
    model, device = told.get("model_config", {}), told.get("device_config", {})
    mode = model.get("logprobs_mode")
    if mode != "processed_logprobs":
        raise EngineError(
            f"the vLLM server at {http.url} runs with --logprobs-mode {mode}: its log-probabilities ignore temperature and "
            "filters; start it with --logprobs-mode processed_logprobs"
        )
    return Facts(
        engine=engine,
        precision=str(model.get("dtype", "unknown")).removeprefix("torch."),
        device=str(device.get("device_type") or "unknown"),
        num_threads=0,
        cache_tokens=told.get("cache_config", {}).get("kv_cache_size_tokens"),
    )


def healthy(http: Http, path: str, timeout_s: float) -> bool:
    """Whether the server answers at ``path`` with status 200."""
    found = http.get(path, timeout_s=timeout_s)
    return isinstance(found, Reply) and found.status == 200


def wait_healthy(http: Http, path: str, wait_s: float, process: ServerProcess | None = None) -> None:
    """Return once the server answers. Raises :class:`EngineError` at the deadline, or when ``process`` ends."""
    deadline = time.monotonic() + wait_s
    while not healthy(http, path, min(_HEALTH_S, wait_s)):
        if process is not None and process.exit_code() is not None:
            raise EngineError(
                f"the server ended with exit code {process.exit_code()}: {process.last_words()}; see {process.log}"
            )
        if time.monotonic() > deadline:
            where = f"; see {process.log}" if process is not None else ""
            raise EngineError(f"the server at {http.url} did not answer {path} within {wait_s:.0f} s{where}")
        time.sleep(0.2)


def control(http: Http, path: str, body: Mapping[str, Any]) -> Any:
    """Make a control call and return its JSON (None where it is empty). Raises :class:`EngineError`."""
    return _read(http, path, http.post(path, body, timeout_s=_CONTROL_S))


def asked(http: Http, path: str) -> dict[str, Any]:
    """Return the JSON object at ``path``. Raises :class:`EngineError`."""
    found = _read(http, path, http.get(path, timeout_s=_CONTROL_S))
    if not isinstance(found, dict):
        raise EngineError(f"{http.url}{path} answered {found!r}, not an object")
    return found


def _read(http: Http, path: str, reply: object) -> Any:
    if not isinstance(reply, Reply):
        raise EngineError(f"{http.url}{path} can't be reached: {getattr(reply, 'cause', reply)}")
    if reply.status != 200:
        hint = (
            "; start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
            if reply.status in {403, 404}
            else ""
        )
        raise EngineError(f"{http.url}{path} answered {reply.words()}{hint}")
    try:
        return json.loads(reply.body) if reply.body else None
    except ValueError:
        raise EngineError(f"{http.url}{path} answered no JSON: {reply.words()}") from None
