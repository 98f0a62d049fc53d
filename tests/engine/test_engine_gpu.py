"""Engines over vLLM on CUDA: contract, publish, throughput. Run by `make test-gpu`; without a GPU it says so."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from vllm_cases import PYTHON, Server, serving, weights

from hotpot.models import checksum
from hotpot.testing.contracts_engine import ENGINE_CONTRACTS, EngineCase, generate, make_request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

ROUNDING = "bfloat16 on a GPU: the kernels that a batch is computed by depend on its size"


def missing() -> str:
    """Return why there is nothing to test on this machine, empty where there is."""
    python = os.environ.get(PYTHON)
    if not python:
        return f"{PYTHON} is not set; it names the Python of an environment with vLLM's CUDA build"
    asked = [python, "-c", "import torch; print(torch.cuda.is_available())"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{python} can't be asked for CUDA: {error}"
    return "" if found.strip() == "True" else f"torch of {python} sees no CUDA device"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if reason := missing():
        pytest.skip(reason)
    with serving(precision="bfloat16", eager=False) as found:
        yield found


@pytest.mark.parametrize("contract", ENGINE_CONTRACTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_contract(contract: Callable[[EngineCase], None], kind: str, server: Server) -> None:
    contract(server.case(lambda: server.attach(kind), logprob_tolerance=0.25, inexact=ROUNDING))


def test_publishes_are_verified(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    engine = server.attach("vllm")
    took = [engine.publish(weights(number), number).seconds for number in range(1, 6)]
    assert engine.info().checksum == checksum(weights(5))
    assert engine.info().device == "cuda"
    with capsys.disabled():
        print(f"\nvLLM on {engine.info().device}: publishes took {[round(s, 2) for s in took]} s")  # noqa: T201
    engine.close()


def test_throughput(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    engine = server.attach("vllm")
    case = server.case(lambda: engine)
    requests = [
        make_request(case, number, prompt=np.ones(16, dtype=np.int32), max_tokens=100)
        for number in range(256)
    ]
    began = time.perf_counter()
    answers = generate(engine, requests)
    speed = sum(len(one.tokens) for one in answers.values()) / (time.perf_counter() - began)
    with capsys.disabled():
        print(f"\nvLLM on {engine.info().device}: {speed:,.0f} tokens/s at {32} requests")  # noqa: T201
    assert {len(one.tokens) for one in answers.values()} == {100}
    engine.close()
