"""The contract of an engine as functions that a plug-in author calls from tests of their own.

::

    @pytest.mark.parametrize("contract", ENGINE_CONTRACTS)
    def test_contract(contract) -> None:
        contract(EngineCase(make=..., weights=..., overrides=..., vocab_size=..., max_context_tokens=...))

Each takes an :class:`EngineCase` and raises AssertionError where the engine breaks the contract.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotpot.engine import Engine
from hotpot.errors import EngineError, SamplingOverrideError
from hotpot.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    Purpose,
    SampleKey,
    SamplingParams,
)

CONTRACT_SAMPLING: Mapping[Purpose, SamplingParams] = {
    Purpose.TRAINING: SamplingParams(),
    Purpose.EVALUATION_GREEDY: SamplingParams(temperature=0.0),
}
"""The frozen parameters every engine under contract is made with."""

LOGPROB_TOLERANCE = 1e-5
"""What rounding may do to a log-probability in float32, in nats."""

_MAX_IDLE_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineCase:
    """An engine under contract.

    ``make()`` returns a fresh engine with :data:`CONTRACT_SAMPLING`; ``weights(n)`` returns its n-th set of weights
    (0 is what it starts with); ``overrides(engine, purpose)`` returns how many requests it refused for their sampling
    parameters. ``vocab_size`` is at least 16, ``max_context_tokens`` between 32 and 512.

    What the engine can't promise is said here, not skipped: ``logprob_tolerance`` in nats between the same request alone and
    in company, and ``inexact``, the reason why its tokens may differ then (empty: they may not).
    """

    make: Callable[[], Engine]
    weights: Callable[[int], Mapping[str, Any]]
    overrides: Callable[[Any, Purpose], int]
    vocab_size: int
    max_context_tokens: int
    logprob_tolerance: float = LOGPROB_TOLERANCE
    inexact: str = ""


def make_request(case: EngineCase, number: int, **changes: Any) -> GenerationRequest:
    """Return a request of the case: request ``number`` has its own prompt, session and key; ``changes`` override."""
    rng = np.random.default_rng(number)
    size = int(rng.integers(3, 12))
    request = GenerationRequest(
        request_id=f"r{number}",
        session_id=f"s{number}",
        prompt=rng.integers(0, case.vocab_size, size).astype(np.int32),
        stop_tokens=(),
        max_tokens=int(rng.integers(4, 12)),
        purpose=Purpose.TRAINING,
        sampling=CONTRACT_SAMPLING[Purpose.TRAINING],
        key=SampleKey(seed=1, issue=number, sample=0, step=0),
    )
    return replace(request, **changes)


def generate(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, Generation]:
    """Submit ``requests``, step until all are answered, and return the answers by request id."""
    for request in requests:
        engine.submit(request)
    return drain(engine, len(requests))


def drain(engine: Engine, count: int) -> dict[str, Generation]:
    """Step until ``count`` generations came back, and return them by request id."""
    answers: dict[str, Generation] = {}
    for _ in range(_MAX_IDLE_STEPS):
        for generation in engine.step():
            _check(generation.request_id not in answers, f"{generation.request_id} was answered twice")
            answers[generation.request_id] = generation
        if len(answers) >= count:
            return answers
    raise AssertionError(f"{len(answers)} of {count} requests were answered in {_MAX_IDLE_STEPS} steps")


def answers_each_request_once(case: EngineCase) -> None:
    """Every request gets one answer with arrays of one length and spans that cover them; then there is nothing left."""
    engine = case.make()
    requests = [make_request(case, number) for number in range(7)]
    answers = generate(engine, requests)
    info = engine.info()
    _check(sorted(answers) == sorted(r.request_id for r in requests), f"answers to {sorted(answers)}")
    for request in requests:
        answer = answers[request.request_id]
        count = len(answer.tokens)
        name = f"{request.request_id}: "
        _check(count == request.max_tokens, name + f"{count} tokens, asked for {request.max_tokens}")
        _check(answer.finish is FinishReason.MAX_TOKENS, name + f"finish is {answer.finish}")
        _check(answer.tokens.dtype == np.int32, name + f"tokens are {answer.tokens.dtype}")
        _check(bool(((answer.tokens >= 0) & (answer.tokens < case.vocab_size)).all()), name + "foreign token")
        for logprobs in (answer.behaviour_logprobs, answer.model_logprobs):
            _check(
                logprobs.shape == (count,) and logprobs.dtype == np.float32, name + "log-probability shape"
            )
            _check(bool(np.isfinite(logprobs).all() and (logprobs <= 1e-6).all()), name + f"{logprobs}")
        _check(sum(s.length for s in answer.versions) == count, name + f"spans {answer.versions}")
        _check({s.policy_version for s in answer.versions} == {info.policy_version}, name + "version")
        _check({s.checksum for s in answer.versions} == {info.checksum}, name + "checksum")
        _check(answer.report.sampling == request.sampling, name + f"reports {answer.report.sampling}")
    _check(engine.step() == [], "a step with nothing to do returned something")
    engine.close()


def ends_at_a_stop_token(case: EngineCase) -> None:
    """A generation ends with the first stop token, which is its last token; others go on."""
    engine = case.make()
    free = generate(engine, [make_request(case, number, max_tokens=8) for number in range(4)])
    stops = {}
    for number in range(4):
        tokens = free[f"r{number}"].tokens.tolist()
        stops[number] = tokens[3], tokens[: tokens.index(tokens[3]) + 1]
    stopped = generate(
        engine,
        [
            make_request(case, n, max_tokens=8, request_id=f"again{n}", stop_tokens=(stops[n][0],))
            for n in range(4)
        ],
    )
    for number, (_, expected) in stops.items():
        answer = stopped[f"again{number}"]
        _check(answer.tokens.tolist() == expected, f"{answer.tokens.tolist()} instead of {expected}")
        _check(answer.finish is FinishReason.STOP, f"finish is {answer.finish}")
    engine.close()


def ends_at_the_context(case: EngineCase) -> None:
    """A generation that fills the context ends with max_context; a prompt that fills it is refused."""
    engine = case.make()
    size = case.max_context_tokens - 3
    prompt = np.full(size, 1, dtype=np.int32)
    answer = generate(engine, [make_request(case, 0, prompt=prompt, max_tokens=50)])["r0"]
    _check(len(answer.tokens) == 3, f"{len(answer.tokens)} tokens where 3 fit")
    _check(answer.finish is FinishReason.MAX_CONTEXT, f"finish is {answer.finish}")
    full = np.full(case.max_context_tokens, 1, dtype=np.int32)
    _refused(engine, make_request(case, 1, prompt=full), str(case.max_context_tokens))
    engine.close()


def refuses_what_it_cannot_serve(case: EngineCase) -> None:
    """Bad requests raise EngineError naming the value, and leave the engine as it was."""
    engine = case.make()
    vocab = case.vocab_size
    _refused(engine, make_request(case, 0, max_tokens=0), "max_tokens is 0")
    _refused(engine, make_request(case, 0, prompt=np.zeros(0, dtype=np.int32)), "empty")
    _refused(engine, make_request(case, 0, prompt=np.array([1, vocab], dtype=np.int32)), str(vocab))
    _refused(engine, make_request(case, 0, prompt=np.array([-1], dtype=np.int32)), "-1")
    _refused(engine, make_request(case, 0, stop_tokens=(vocab + 5,)), str(vocab + 5))
    _refused(engine, make_request(case, 0, key=SampleKey(seed=0, issue=-3, sample=0, step=0)), "-3")
    engine.submit(make_request(case, 1))
    _refused(engine, make_request(case, 1), "r1")
    _check(list(drain(engine, 1)) == ["r1"], "a refused request was answered")
    _check(
        list(generate(engine, [make_request(case, 1)])) == ["r1"],
        "an id can't be used again after its answer",
    )
    engine.close()


def keeps_sampling_frozen(case: EngineCase) -> None:
    """A request with other sampling parameters than its purpose's is refused by name, counted, and changes nothing."""
    engine = case.make()
    override = SamplingParams(temperature=0.7)
    for number in range(2):
        try:
            engine.submit(make_request(case, number, sampling=override, sender="the contract"))
        except SamplingOverrideError as error:
            named = (f"r{number}", f"s{number}", "the contract", "0.7", "1.0")
            _check(
                all(word in str(error) for word in named),
                f"the message does not name all of {named}: {error}",
            )
        else:
            raise AssertionError("a request with other sampling parameters was taken")
    counted = case.overrides(engine, Purpose.TRAINING)
    _check(counted == 2, f"{counted} refusals counted instead of 2")
    _check(case.overrides(engine, Purpose.EVALUATION_GREEDY) == 0, "counted under another purpose")
    kept = engine.gate.take_overrides()
    _check([one.request_id for one in kept] == ["r0", "r1"], f"kept of the refusals: {kept}")
    _check(engine.gate.sampling == CONTRACT_SAMPLING, f"the gate has {engine.gate.sampling}")
    unknown = make_request(case, 3, purpose=Purpose.EVALUATION)
    _refused(engine, unknown, Purpose.EVALUATION.value)
    greedy = make_request(
        case,
        4,
        purpose=Purpose.EVALUATION_GREEDY,
        sampling=CONTRACT_SAMPLING[Purpose.EVALUATION_GREEDY],
    )
    answer = generate(engine, [greedy])["r4"]
    _check(bool((answer.behaviour_logprobs == 0).all()), "greedy tokens have behaviour log-probability 0")
    engine.close()


def same_request_same_tokens(case: EngineCase) -> None:
    """A request's tokens do not depend on its id, its session, its company or what the engine did before.

    Log-probabilities may differ by rounding. So could a token whose random number falls on a boundary; these few
    requests are too few to meet one.
    """
    alone = case.make()
    lonely = [generate(alone, [make_request(case, number)])[f"r{number}"] for number in range(6)]
    together = case.make()
    generate(together, [make_request(case, number) for number in range(50, 55)])
    crowd = generate(
        together,
        [
            make_request(case, number, request_id=f"x{number}", session_id=f"y{number}")
            for number in (30, 2, 31, 0, 1, 5, 4, 3, 32)
        ],
    )
    differing = 0
    for number, answer in enumerate(lonely):
        other = crowd[f"x{number}"]
        same = answer.tokens == other.tokens
        common = len(same) if same.all() else int(same.argmin())
        differing += common < len(same)
        _check(bool(case.inexact) or common == len(same), f"request {number} depends on its company")
        for name in ("behaviour_logprobs", "model_logprobs"):
            gaps = np.abs(getattr(answer, name) - getattr(other, name))[:common]
            gap = float(gaps.max(initial=0.0))
            _check(gap <= case.logprob_tolerance, f"request {number}: {name} differ by {gap}")
    _check(differing <= len(lonely) // 2, f"{differing} of {len(lonely)} requests depend on their company")
    alone.close()
    together.close()


def publishes_whole_versions(case: EngineCase) -> None:
    """A publish changes version and checksum, between tokens only; a version is never used again."""
    engine = case.make()
    before = engine.info()
    engine.submit(make_request(case, 0, max_tokens=20))
    early = engine.step()
    report = engine.publish(case.weights(1), before.policy_version + 3)
    after = engine.info()
    _check(after.policy_version == report.policy_version == before.policy_version + 3, f"{after}")
    _check(after.checksum == report.checksum != before.checksum, "the checksum stayed the same")
    answer = early[0] if early else drain(engine, 1)["r0"]
    known = [(i.policy_version, i.checksum) for i in (before, after)]
    spans = [(s.policy_version, s.checksum) for s in answer.versions]
    _check(
        spans in (known[:1], known, known[1:]),
        f"spans {answer.versions} name what was not served in this order",
    )
    _check(sum(s.length for s in answer.versions) == len(answer.tokens) == 20, f"{answer.versions}")
    later = generate(engine, [make_request(case, 1)])["r1"]
    _check([s.policy_version for s in later.versions] == [after.policy_version], f"{later.versions}")
    for version in (after.policy_version, before.policy_version):
        try:
            engine.publish(case.weights(2), version)
        except EngineError as error:
            _check(str(version) in str(error), f"the message does not name the version: {error}")
        else:
            raise AssertionError(f"version {version} was published twice")
    _check(engine.info() == after, "a refused publish changed what is served")
    engine.close()


def closes_for_good(case: EngineCase) -> None:
    """After close every call raises EngineError, except close."""
    engine = case.make()
    engine.submit(make_request(case, 0))
    engine.close()
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: engine.submit(make_request(case, 1)),
        engine.step,
        engine.info,
        lambda: engine.publish(case.weights(1), 99),
    ]
    for call in calls:
        try:
            call()
        except EngineError as error:
            _check("closed" in str(error), f"the message does not say so: {error}")
        else:
            raise AssertionError("a closed engine answered")


ENGINE_CONTRACTS: tuple[Callable[[EngineCase], None], ...] = (
    answers_each_request_once,
    ends_at_a_stop_token,
    ends_at_the_context,
    refuses_what_it_cannot_serve,
    keeps_sampling_frozen,
    same_request_same_tokens,
    publishes_whole_versions,
    closes_for_good,
)
"""Every contract of an engine."""


def _refused(engine: Engine, request: GenerationRequest, named: str) -> None:
    try:
        engine.submit(request)
    except EngineError as error:
        _check(named in str(error), f"the message does not name {named!r}: {error}")
        return
    raise AssertionError(f"a request that can't be served was taken: {request}")


def _check(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as the assertion it is
    if not holds:
        raise AssertionError(otherwise)
