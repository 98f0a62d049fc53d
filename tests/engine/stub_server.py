"""A server in this process that speaks vLLM's and OpenAI's protocol over an embedded engine, and breaks on demand.

Faults are named: ``faults`` is consumed one for each request for tokens ("" is none); ``stale`` makes every reload say success
and change nothing.
"""

import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.models import Decoder, load_decoder, next_token_logprobs
from hotpot.types import FinishReason, Generation, GenerationRequest, Purpose, SampleKey, SamplingParams


class StubServer:
    """Serves ``decoder`` until :meth:`close`; ``sampling`` are the parameters it knows."""

    def __init__(
        self, decoder: Decoder, *, sampling: Mapping[Purpose, SamplingParams], max_context_tokens: int
    ) -> None:
        self.faults: deque[str] = deque()
        self.stale = False
        self.asked: list[dict[str, Any]] = []
        self.out = self.most_out = 0
        self.logprobs_mode = "processed_logprobs"
        self.slow_s = 0.0
        self.hanging = 0
        self._closed = threading.Event()
        self.cache_tokens = 100_000
        self._sampling = {**sampling, Purpose.EVALUATION: SamplingParams()}
        self._max_context = max_context_tokens
        self._lock = threading.Lock()
        self._running = threading.Event()
        self._running.set()
        self._load(decoder, "default")
        self._count = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._running.set()
        self._server.shutdown()
        self._server.server_close()

    def hang(self) -> None:
        """Let a request wait for as long as this server lives."""
        self.hanging += 1
        self._closed.wait()
        self.hanging -= 1

    def restart(self, decoder: Decoder) -> None:
        """Lose the weights, as a process that somebody started again."""
        with self._lock:
            self._load(decoder, "default")

    def control(self, path: str, body: dict[str, Any]) -> Any:
        name, _, query = path.partition("?")
        if name == "/pause":
            while "wait" in query and self.out:
                time.sleep(0.002)
            self._running.clear()
        elif name == "/resume":
            self._running.set()
        elif name == "/update_weight_version":
            self.label = self._labels[self.version] = body["new_version"]
        elif name == "/collective_rpc" and not self.stale:
            with self._lock:
                decoder = load_decoder(Path(body["kwargs"]["weights_path"]))
                self._decoder = decoder
                self.version += 1
                self._labels[self.version] = "loaded"
                self._engine.publish(dict(decoder.named_parameters()), self.version)
        return {"success": True, "status": name}

    def told(self, path: str) -> Any:
        model = {"logprobs_mode": self.logprobs_mode, "dtype": "torch.float32"}
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": "policy"}]},
            "/weight_info": {"weight_version": self.label},
            "/server_info": {
                "vllm_config": {
                    "model_config": model,
                    "device_config": {"device_type": "cpu"},
                    "cache_config": {"kv_cache_size_tokens": self.cache_tokens},
                }
            },
        }.get(path.partition("?")[0])

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = "token_ids" in body
        told = body["sampling_params"] if tokens else body
        prompt = body["token_ids"] if tokens else body["prompt"]
        if told.get("prompt_logprobs") is not None:
            return self._scores(prompt)
        asked = SamplingParams(
            temperature=told["temperature"],
            top_p=told["top_p"],
            top_k=max(0, told["top_k"]),
            repetition_penalty=told["repetition_penalty"],
        )
        purpose = next(purpose for purpose, params in self._sampling.items() if params == asked)
        with self._lock:
            self._count += 1
            request = GenerationRequest(
                request_id=str(self._count),
                session_id=str(self._count),
                prompt=np.array(prompt, dtype=np.int32),
                stop_tokens=tuple(told["stop_token_ids"]),
                max_tokens=told["max_tokens"],
                purpose=purpose,
                sampling=asked,
                key=SampleKey(seed=told["seed"], issue=0, sample=0, step=0),
            )
            self._engine.submit(request)
            self.out += 1
            self.most_out = max(self.most_out, self.out)
        try:
            found = self._wait(request.request_id)
        finally:
            with self._lock:
                self.out -= 1
        return self._tokens_answer(found, prompt) if tokens else self._completion(found, prompt)

    def _wait(self, request_id: str) -> Generation:
        while True:
            self._running.wait()
            time.sleep(self.slow_s)
            with self._lock:
                if request_id not in self._done and self._running.is_set():
                    self._done.update({one.request_id: one for one in self._engine.step()})
                if request_id in self._done:
                    return self._done.pop(request_id)

    def _tokens_answer(self, found: Generation, prompt: list[int]) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1}
            for token, logprob in zip(found.tokens.tolist(), _said(found), strict=True)
        ]
        versions, at = [], 0
        for span in found.versions:
            versions.append(
                {"version": self._labels[span.policy_version], "start": at, "end": at + span.length}
            )
            at += span.length
        choice = {
            "finish_reason": _finish(found),
            "token_ids": found.tokens.tolist(),
            "logprobs": {"content": content},
            "weight_versions": versions,
        }
        return {"model": "policy", "choices": [choice], "usage": _usage(prompt, found)}

    def _completion(self, found: Generation, prompt: list[int]) -> dict[str, Any]:
        scored = {
            "tokens": [f"token_id:{token}" for token in found.tokens.tolist()],
            "token_logprobs": _said(found),
        }
        choice = {"finish_reason": _finish(found), "token_ids": found.tokens.tolist(), "logprobs": scored}
        return {"model": "policy", "choices": [choice], "usage": _usage(prompt, found)}

    def _scores(self, tokens: list[int]) -> dict[str, Any]:
        rows = next_token_logprobs(self._decoder, np.array(tokens, dtype=np.int32))
        scores = [{str(token): {"logprob": float(rows[at, token])}} for at, token in enumerate(tokens[1:])]
        choice = {
            "finish_reason": "length",
            "token_ids": [0],
            "weight_versions": [{"version": self.label, "start": 0, "end": 1}],
        }
        return {"model": "policy", "choices": [choice], "prompt_logprobs": [None, *scores]}

    def _load(self, decoder: Decoder, label: str) -> None:
        decoder = _untied(decoder)
        self._decoder, self.version, self.label = decoder, 0, label
        self._labels = {0: label}
        self._done: dict[str, Generation] = {}
        self._engine = EmbeddedEngine(
            decoder.config,
            dict(decoder.named_parameters()),
            settings=EngineSection(max_concurrency=16),
            max_context_tokens=self._max_context,
            sampling=self._sampling,
        )


class _Handler(BaseHTTPRequestHandler):
    stub: StubServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        found = self.stub.told(self.path)
        self._answer(404 if found is None else 200, found)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path not in {"/v1/completions", "/inference/v1/generate"}:
            self._answer(200, self.stub.control(self.path, body))
            return
        stub = self.stub
        stub.asked.append(body)
        self._tokens(body, stub.faults.popleft() if stub.faults else "")

    def _tokens(self, body: dict[str, Any], fault: str) -> None:
        if fault.isdigit():
            self._answer(int(fault), {"error": {"message": "not now"}})
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif fault == "hang":
            self.stub.hang()
        else:
            found = self.stub.generate(body)
            spoil(found, fault)
            self._answer(200, found, cut=fault == "cut", nonsense=fault == "nonsense")

    def _answer(self, status: int, body: Any, *, cut: bool = False, nonsense: bool = False) -> None:
        data = b"<html>" if nonsense else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)


def spoil(payload: dict[str, Any], fault: str) -> None:
    """Make an answer wrong in the way ``fault`` names."""
    choice = payload["choices"][0]
    content = choice.get("logprobs", {}).get("content", [])
    if fault == "other model":
        payload["model"] = "another"
    elif fault == "no log-probability":
        content[-1]["logprob"] = None
    elif fault == "NaN":
        content[-1]["logprob"] = -9999.0
    elif fault == "one short":
        content.pop()
    elif fault == "other tokens":
        content[0]["token_id"] += 1
    elif fault == "truncated prompt":
        payload["usage"]["prompt_tokens"] -= 1
    elif fault == "finish":
        choice["finish_reason"] = "content_filter"
    elif fault == "abort":
        choice["finish_reason"] = "abort"
    elif fault == "foreign weights":
        choice["weight_versions"][0]["version"] = "somebody-else"
    elif fault == "gap":
        choice["weight_versions"][0]["end"] -= 1


def _untied(decoder: Decoder) -> Decoder:
    """Return the same model with a head of its own, as the folders that engines write have it."""
    if not decoder.config.tie_embeddings:
        return decoder
    state = decoder.state_dict()
    other = Decoder(replace(decoder.config, tie_embeddings=False))
    other.load_state_dict(state | {"lm_head.weight": state["embed_tokens.weight"].clone()})
    return other


def _said(found: Generation) -> list[float]:
    """Return what vLLM gives: the processed log-probabilities, which are the raw model's where greedy."""
    greedy = found.report.sampling.temperature == 0
    values = found.model_logprobs if greedy else found.behaviour_logprobs
    return [float(one) for one in values]


def _finish(found: Generation) -> str:
    return "stop" if found.finish is FinishReason.STOP else "length"


def _usage(prompt: list[int], found: Generation) -> dict[str, Any]:
    return {
        "prompt_tokens": len(prompt),
        "prompt_tokens_details": {"cached_tokens": found.report.reused_tokens},
    }
