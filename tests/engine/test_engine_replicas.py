"""Several engines as one: alike or refused, sticky sessions, and a publish to all or to none."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from test_engine_contracts import VOCAB, case, make_embedded, make_fake
from test_engine_versions import QUICK, SAMPLING, TOY, Versions, request
from test_engine_versions import make_embedded as make_toy

from hotpot.engine.replicas import ReplicaGroup
from hotpot.errors import EngineError
from hotpot.models import checksum
from hotpot.testing.contracts_engine import (
    CONTRACT_SAMPLING,
    ENGINE_CONTRACTS,
    EngineCase,
    drain,
    generate,
    make_request,
)
from hotpot.testing.defaulting import DefaultingEngine, greedy_by_default
from hotpot.testing.engine import FakeEngine
from hotpot.types import EngineInfo, PublishReport, Purpose, SamplingParams

CASE = case(make_fake)

GROUPS: dict[str, Callable[[], ReplicaGroup]] = {
    "one fake": lambda: ReplicaGroup([make_fake()], {}),
    "two fakes": lambda: ReplicaGroup([make_fake(tokens_per_step=2), make_fake(tokens_per_step=3)], {}),
    "two embedded": lambda: ReplicaGroup(
        [make_embedded(max_concurrency=2), make_embedded(max_concurrency=3)], CASE.weights(0)
    ),
}


@pytest.mark.parametrize("contract", ENGINE_CONTRACTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("group", GROUPS)
def test_contract(contract: Callable[[EngineCase], None], group: str) -> None:
    contract(case(GROUPS[group]))


class Replica(FakeEngine):
    """A fake that can be another kind of engine, and fail a publish."""

    changes: Any = None
    refuses: tuple[int, ...] = ()
    weights_name = "w0"

    def publish(self, weights: Any, policy_version: int) -> PublishReport:
        if policy_version in self.refuses:
            raise EngineError("its memory is full")
        report = super().publish(weights, policy_version)
        self.weights_name = f"w{int(weights['n'])}"
        return dataclasses.replace(report, checksum=self._checksum)

    def info(self) -> EngineInfo:
        return dataclasses.replace(super().info(), **(self.changes or {}))

    @property
    def _checksum(self) -> str:
        return self.weights_name


def endless(prompt: Any) -> Iterator[int]:
    while True:
        yield int(prompt[0])


def replica(**changes: Any) -> Replica:
    named = {"vocab_size": VOCAB, "sampling": CONTRACT_SAMPLING, "tokens_per_step": 2}
    limits = {
        key: changes.pop(key) for key in (*named, "max_context_tokens", "max_concurrency") if key in changes
    }
    made = Replica(endless, **{**named, **limits})
    made.changes = changes
    return made


def weights(number: int) -> dict[str, Any]:
    return {"n": torch.tensor(number)}


def group(*replicas: Replica) -> ReplicaGroup:
    return ReplicaGroup(replicas or (replica(), replica()), weights(0))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "engine": ({"engine": "vllm"}, "engine vllm, the group has fake"),
    "precision": ({"precision": "bfloat16"}, "precision bfloat16, the group has none"),
    "device": ({"device": "cuda:0"}, "kind of device cuda, the group has none"),
    "context": ({"max_context_tokens": 64}, "max_context_tokens 64, the group has 512"),
    "vocabulary": ({"vocab_size": 41}, "vocabulary 41, the group has 40"),
    "sampling": (
        {"sampling": {**CONTRACT_SAMPLING, Purpose.TRAINING: SamplingParams(temperature=0.0)}},
        "temperature=0.0",
    ),
    "weights": ({"checksum": "w9"}, "checksum w9, the group has w0"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_replica_that_is_another_is_refused_when_the_group_is_made_and_when_it_comes(what: str) -> None:
    changes, words = OTHERS[what]
    with pytest.raises(EngineError, match="replica 1 has") as caught:
        group(replica(), replica(**changes))
    assert words in str(caught.value)
    made = group()
    with pytest.raises(EngineError, match="replica 0 has"):
        made.replace(0, replica(**changes))
    assert list(generate(made, [make_request(CASE, 1)])) == ["r1"]


def test_a_replica_that_became_another_is_refused_at_the_next_publish() -> None:
    one, two = replica(), replica()
    made = group(one, two)
    two.changes = {"precision": "bfloat16"}
    with pytest.raises(EngineError, match="replica 1 has precision bfloat16"):
        made.publish(weights(1), 1)
    assert (one.weights_name, made.info().policy_version) == ("w0", 0)


def test_devices_of_one_kind_and_other_concurrency_go_together() -> None:
    made = group(replica(device="cuda:0", max_concurrency=3), replica(device="cuda:1", max_concurrency=4))
    assert (made.info().device, made.info().max_concurrency) == ("cuda", 7)


def test_no_replicas_or_one_twice_are_no_group() -> None:
    one = replica()
    for replicas in ([], [one, one]):
        with pytest.raises(EngineError, match="each engine once"):
            ReplicaGroup(replicas, {})


def test_sessions_stay_and_new_ones_go_where_least_is_out() -> None:
    one, two = replica(), replica()
    made = group(one, two)
    for number in range(6):
        made.submit(make_request(CASE, number, max_tokens=2 if number % 2 else 8))
    assert [len(one.submitted), len(two.submitted)] == [3, 3]
    drain(made, 3)  # the short ones, all on the second replica
    for number in range(6):
        made.submit(make_request(CASE, number, request_id=f"again{number}", max_tokens=2))
    assert [r.session_id for r in one.submitted[3:]] == ["s0", "s2", "s4"]
    assert [r.session_id for r in two.submitted[3:]] == ["s1", "s3", "s5"]
    drain(made, 9)
    made.submit(make_request(CASE, 7, max_tokens=8))
    made.submit(make_request(CASE, 8, max_tokens=8))
    assert [r.request_id for r in (one.submitted[-1], two.submitted[-1])] == ["r7", "r8"]


def spans(made: ReplicaGroup, count: int) -> list[list[tuple[int, str, int]]]:
    answers = drain(made, count)
    return [
        [(s.policy_version, s.checksum, s.length) for s in answers[name].versions] for name in sorted(answers)
    ]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_publish_that_one_replica_refuses_leaves_all_on_the_old_version(which: int) -> None:
    replicas = [replica() for _ in range(3)]
    replicas[which].refuses = (1,)
    made = group(*replicas)
    for number in range(3):
        made.submit(make_request(CASE, number, max_tokens=6))
    assert made.step() == []
    with pytest.raises(
        EngineError, match=rf"replica {which} of 3 did not take .* memory is full.*goes on with 0"
    ):
        made.publish(weights(1), 1)
    assert (made.info().policy_version, made.info().checksum) == (0, "w0")
    assert [one.weights_name for one in replicas] == ["w0"] * 3
    assert made.step() == []
    # The number is not used up: it was never served.
    made.publish(weights(2), 2)
    assert spans(made, 3) == [[(0, "w0", 4), (2, "w2", 2)]] * 3
    assert made.info().policy_version == 2
    answer = generate(made, [make_request(CASE, 9, max_tokens=2)])["r9"]
    assert [(s.policy_version, s.checksum) for s in answer.versions] == [(2, "w2")]


def test_a_replica_that_cannot_go_back_stops_the_group_until_it_is_replaced() -> None:
    one, two = replica(), replica()
    one.refuses, two.refuses = (2,), (1,)
    made = group(one, two)
    for number in range(4):
        made.submit(make_request(CASE, number, max_tokens=6))
    with pytest.raises(EngineError, match="replica 1 of 2"):
        made.publish(weights(1), 1)
    for call in (made.step, made.info, lambda: made.submit(make_request(CASE, 9))):
        with pytest.raises(EngineError, match=r"replica 0 does not serve .* could not go back .*replace it"):
            call()
    made.replace(0, replica())
    # What the lost one had is asked again of the new one; nothing is answered twice, nothing lost.
    assert spans(made, 4) == [[(0, "w0", 6)]] * 4
    with pytest.raises(EngineError, match="closed"):
        one.step()


def test_a_step_that_breaks_names_the_replica_and_loses_no_answer() -> None:
    class Breaking(Replica):
        broken = True

        def step(self) -> Any:
            if self.broken:
                raise EngineError("its logits are no distribution")
            return super().step()

    broken = Breaking(endless, vocab_size=VOCAB, sampling=CONTRACT_SAMPLING)
    made = group(replica(), broken)
    for number in range(2):
        made.submit(make_request(CASE, number, max_tokens=2))
    with pytest.raises(EngineError, match="replica 1: its logits"):
        made.step()
    broken.broken = False
    assert sorted(drain(made, 2)) == ["r0", "r1"]


def test_a_replica_that_lies_about_what_it_serves_is_found() -> None:
    class Lying(Replica):
        def publish(self, weights: Any, policy_version: int) -> PublishReport:
            report = super().publish(weights, policy_version)
            return dataclasses.replace(report, checksum="w7") if policy_version == 1 else report

    lying = Lying(endless, vocab_size=VOCAB, sampling=CONTRACT_SAMPLING)
    made = group(replica(), lying)
    with pytest.raises(EngineError, match=r"replica 1 .* reports checksum w7, replica 0 w1"):
        made.publish(weights(1), 1)
    assert lying.weights_name == "w0"
    assert made.info().checksum == "w0"


def test_an_answer_that_was_sampled_otherwise_names_its_replica() -> None:
    hidden = DefaultingEngine(replica(sampling=greedy_by_default(CONTRACT_SAMPLING)), replica().gate)
    made = ReplicaGroup([replica(), hidden], weights(0))
    answers = generate(made, [make_request(CASE, number) for number in range(4)])
    told = {
        name: (answer.report.engine, answer.report.sampling.temperature) for name, answer in answers.items()
    }
    assert told == {
        "r0": ("fake", 1.0),
        "r1": ("fake, replica 1", 0.0),
        "r2": ("fake", 1.0),
        "r3": ("fake, replica 1", 0.0),
    }


def test_the_same_tokens_from_a_group_as_from_one_engine() -> None:
    requests = [make_request(CASE, number) for number in range(12)]
    alone, together = generate(make_embedded(), requests), generate(GROUPS["two embedded"](), requests)
    for name, answer in alone.items():
        assert answer.tokens.tolist() == together[name].tokens.tolist()
        np.testing.assert_allclose(answer.model_logprobs, together[name].model_logprobs, atol=1e-5)


class GroupVersions(Versions):
    """The histories of one engine, over two; some publishes fail on the second only."""

    make = staticmethod(lambda: ReplicaGroup([make_toy(), make_toy(max_concurrency=2)], TOY.weights(0)))


class TestGroupVersions(GroupVersions.TestCase):  # type: ignore[name-defined,misc]
    """A few histories in every run of the tests."""

    settings = settings(QUICK, max_examples=5, stateful_step_count=20)


def test_half_a_publish_leaves_no_trace_in_what_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica had the new weights for a moment: nothing it computes afterwards rests on them."""
    one, two = make_toy(), make_toy()
    made = ReplicaGroup([one, two], TOY.weights(0))
    monkeypatch.setattr(two, "publish", _refuse)
    for number in range(6):
        made.submit(request(number, np.ones(40 + number, np.int32), max_tokens=20, stop_tokens=()))
    for _ in range(4):
        made.step()
    with pytest.raises(EngineError, match="replica 1 of 2"):
        made.publish(TOY.weights(5), 5)
    made.submit(request(7, np.ones(50, np.int32), max_tokens=20, stop_tokens=()))
    for answer in drain(made, 7).values():
        assert [span.policy_version for span in answer.versions] == [0]
        TOY.check(answer, {0: checksum(TOY.weights(0))})
    assert SAMPLING.keys() == made.gate.sampling.keys()


def _refuse(*_: Any) -> Any:
    raise EngineError("no")
