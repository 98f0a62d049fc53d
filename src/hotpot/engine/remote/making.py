"""Remote engines from a recipe's section: the only wiring of this room.

Owns the command that starts a vLLM server, and which wire, host and limits go together for which kind.
"""

import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from hotpot.config.sections import OpenAIEngineSection, VllmEngineSection
from hotpot.engine.remote.admission import Admission
from hotpot.engine.remote.backoff import Backoff
from hotpot.engine.remote.calls import Calls
from hotpot.engine.remote.checking import needs_scores
from hotpot.engine.remote.completions import CompletionsWire
from hotpot.engine.remote.engine import Limits, RemoteEngine
from hotpot.engine.remote.generate import GenerateWire
from hotpot.engine.remote.hosts import Facts, FixedHost, Host, SglangHost, VllmHost, vllm_facts
from hotpot.engine.remote.http import Http
from hotpot.engine.remote.probes import TOLERANCE
from hotpot.engine.remote.process import ServerProcess, free_port
from hotpot.engine.remote.questions import Questions
from hotpot.engine.remote.serving import Serving
from hotpot.engine.remote.weights import Served, WeightStore
from hotpot.engine.remote.wire import Wire
from hotpot.errors import EngineError
from hotpot.models import Policy, Weights
from hotpot.types import Purpose, SamplingParams

Settings = VllmEngineSection | OpenAIEngineSection


def make_remote_engine(
    policy: Policy,
    weights: Weights,
    *,
    settings: Settings,
    max_context_tokens: int,
    sampling: Mapping[Purpose, SamplingParams],
    policy_version: int = 0,
) -> RemoteEngine:
    """Return an engine over a server that serves ``weights`` as ``policy_version``, verified.

    ``policy`` says what the weights are of; it is copied. A vLLM server is started unless ``settings.url`` is given. A server
    with fixed weights must serve exactly these.

    Raises :class:`EngineError` where the server does not come up, lacks what an engine needs, or serves something else.
    """
    if max_context_tokens > policy.config.max_context_tokens:
        raise EngineError(
            f"max_context_tokens is {max_context_tokens} but the model is built for {policy.config.max_context_tokens}; "
            "lower rollout.max_context_tokens, or use a model with a longer context"
        )
    with ExitStack() as stack:
        store = WeightStore(policy, name=f"hotpot-{uuid.uuid4().hex[:8]}")
        stack.callback(store.close)
        served = store.make(weights, policy_version)
        if isinstance(settings, VllmEngineSection):
            http, host = _vllm(
                settings,
                served.folder,
                _model_context(policy, max_context_tokens, sampling),
                stack,
            )
            wire: Wire = GenerateWire(settings.model)
        else:
            http, host = _openai(settings, served.folder)
            wire = CompletionsWire(settings.model, salted=settings.salted)
        engine = _assemble(
            wire,
            host,
            http,
            store,
            settings=settings,
            served=served,
            vocab_size=policy.config.vocab_size,
            max_context_tokens=max_context_tokens,
            sampling=sampling,
        )
        stack.pop_all()
        return engine


def borrow(engine: RemoteEngine, policy: Policy, weights: Weights, settings: Settings) -> RemoteEngine:
    """Return a second engine over the server of ``engine``, which must be idle until the second is closed.

    It serves ``weights`` as version 0. Closing it puts the weights of ``engine`` back and verifies them.
    """
    if not engine.idle:
        raise EngineError("the engine has requests under way; borrow its server between collections")
    store = WeightStore(policy, name=f"hotpot-{uuid.uuid4().hex[:8]}")
    http = Http(engine.url)
    wire: Wire = (
        GenerateWire(settings.model)
        if isinstance(settings, VllmEngineSection)
        else CompletionsWire(settings.model, salted=settings.salted)
    )
    try:
        return _assemble(
            wire,
            engine.serving.host,
            http,
            store,
            settings=settings,
            served=store.make(weights, 0),
            vocab_size=policy.config.vocab_size,
            max_context_tokens=engine.info().max_context_tokens,
            sampling=engine.gate.sampling,
            on_close=engine.serving.take,
        )
    except BaseException:
        store.close()
        engine.serving.take()
        raise


def _assemble(
    wire: Wire,
    host: Host,
    http: Http,
    store: WeightStore,
    *,
    settings: Settings,
    served: Served,
    vocab_size: int,
    max_context_tokens: int,
    sampling: Mapping[Purpose, SamplingParams],
    on_close: Callable[[], None] | None = None,
) -> RemoteEngine:
    vllm = settings if isinstance(settings, VllmEngineSection) else None
    calls = Calls(
        http,
        Backoff(retries=settings.retries),
        timeout_s=settings.request_timeout_s,
        max_concurrency=settings.max_concurrency,
        # Without labels a lost connection may mean a restart with other weights: verify before asking again.
        retry_lost=vllm is not None,
    )
    keep = vllm is not None and vllm.in_flight == "continue"
    questions = Questions(wire, model=settings.model, max_context_tokens=max_context_tokens)
    try:
        return RemoteEngine(
            serving=Serving(
                host,
                store,
                served,
                questions=questions,
                ask=calls.now,
                vocab_size=vocab_size,
                max_context_tokens=max_context_tokens,
                tolerance=settings.publish_tolerance or TOLERANCE[settings.precision],
                keep=keep,
            ),
            questions=questions,
            calls=calls,
            url=http.url,
            vocab_size=vocab_size,
            sampling=sampling,
            admission=Admission(
                max_requests=settings.max_concurrency,
                max_tokens=_token_budget(settings, host, max_context_tokens),
            ),
            limits=Limits(
                max_context_tokens=max_context_tokens,
                max_concurrency=settings.max_concurrency,
                request_timeout_s=settings.request_timeout_s,
                recoveries=settings.recoveries,
                keep_in_flight=keep,
            ),
            on_close=on_close or host.close,
        )
    except BaseException:
        calls.close()
        raise


def _token_budget(settings: Settings, host: Host, max_context_tokens: int) -> int:
    """Return how many tokens may be out: the recipe's number, or fewer where the server says that its cache holds fewer."""
    holds = host.facts.cache_tokens
    budget = settings.max_tokens_in_flight if holds is None else min(settings.max_tokens_in_flight, holds)
    if budget < max_context_tokens:
        raise EngineError(
            f"{budget} tokens may be in flight (engine.max_tokens_in_flight = {settings.max_tokens_in_flight}, the server's cache "
            f"holds {holds}), and one request may have rollout.max_context_tokens = {max_context_tokens}; raise the smaller of "
            "the first two (engine.kv_cache_bytes), or lower the last"
        )
    return budget


def _model_context(
    policy: Policy, max_context_tokens: int, sampling: Mapping[Purpose, SamplingParams]
) -> int:
    """Return the context a server is started with: one more token where whole contexts are scored behind."""
    scored = any(needs_scores(params) for params in sampling.values())
    longest = policy.config.max_context_tokens
    if scored and max_context_tokens == longest:
        raise EngineError(
            f"rollout.max_context_tokens = {max_context_tokens} is all the model is built for, and off temperature 1 a server "
            "scores a whole context only with one token of room; lower it by 1"
        )
    return max_context_tokens + scored


def _vllm(
    settings: VllmEngineSection, folder: Path, model_context: int, stack: ExitStack
) -> tuple[Http, Host]:
    """Return the server, up: the one at ``settings.url``, or one that is started with ``folder``."""
    url, process = settings.url, None
    if url is None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        process = _process(settings, port, model_context)
        stack.callback(process.stop)
    http = Http(url)
    facts = Facts(engine="vllm", precision=settings.precision, device="unknown", num_threads=0)
    host = VllmHost(http, facts, process, wait_s=settings.start_timeout_s, labels=True)
    host.revive(folder)
    found = vllm_facts(http, engine="vllm")
    if found.precision != settings.precision:
        raise EngineError(
            f"the vLLM server at {url} computes in {found.precision}, engine.precision is {settings.precision!r}; "
            "give both the same"
        )
    host.facts = found if process is None else replace(found, num_threads=settings.threads)
    return http, host


def _openai(settings: OpenAIEngineSection, folder: Path) -> tuple[Http, Host]:
    http = Http(settings.url)
    facts = Facts(engine="openai", precision=settings.precision, device="unknown", num_threads=0)
    host: Host
    if settings.weights == "vllm":
        host = VllmHost(http, facts, None, wait_s=60.0, labels=True)
    else:
        host = (FixedHost if settings.weights == "fixed" else SglangHost)(http, facts)
    host.revive(folder)
    if settings.weights == "vllm":
        host.facts = vllm_facts(http, engine="openai")
    return http, host


def _process(settings: VllmEngineSection, port: int, model_context: int) -> ServerProcess:
    python = settings.python
    if not python.is_file():
        raise EngineError(
            f"engine.python = {str(python)!r} is no file; run `make setup-vllm`, or give the Python of an environment with vLLM"
        )

    def command(folder: Path) -> list[str]:
        return [
            str(python.absolute()),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--served-model-name", settings.model),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", settings.precision, "--max-model-len", str(model_context)),
            *("--max-num-seqs", str(settings.max_concurrency)),
            *("--kv-cache-memory-bytes", str(settings.kv_cache_bytes)),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--enable-scale-out", "--enable-prompt-tokens-details", "--skip-tokenizer-init"),
            *(["--enforce-eager"] if settings.eager else []),
            *settings.arguments,
        ]

    return ServerProcess(
        command,
        environment={
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(settings.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # --enforce-eager alone still compiles the ranking of log-probabilities, at the first request and with g++.
            **({"TORCH_COMPILE_DISABLE": "1"} if settings.eager else {}),
        },
        log=Path(tempfile.gettempdir()) / f"hotpot-vllm-{port}.log",  # stays where the server failed
    )
