"""Out of memory: passes halved once, recorded, carried, done again without it; refusals that say what to set."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_batch, make_decoder, make_sequence

from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError
from hotpot.learner import Halving, Learner, recorded_halving
from hotpot.learner.batches import passes
from hotpot.learner.batches.budget import PassBudget, out_of_memory
from hotpot.learner.scores import forward
from hotpot.models import checksum

WORKER = Path(__file__).with_name("learner_memory_worker.py")

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
]

ALL = {
    "kl_coefficient": 0.1, "entropy_coefficient": 0.02, "epochs": 2, "minibatches": 2, "critic": "head",
    "advantages": "gae",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASS_TOKENS", 192)


def make_learner(**settings) -> Learner:
    section = LearnerSection(**{"learning_rate": 1e-3, "minibatches": 2, "max_grad_norm": 1e9, **settings})
    reference = make_decoder(seed=7) if section.kl_coefficient else None
    return Learner(make_decoder(), section, total_updates=10, seed=0, temperature=1.0, reference=reference)


class Memory:
    """Has none at the calls of the forward pass that are numbered so, counted from 0; ``seen`` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception, *fails: int) -> None:
        self.seen, self.fails, self.error = 0, fails, error
        true = forward.hidden_states

        def hidden_states(*arguments):
            self.seen += 1
            if self.seen - 1 in self.fails:
                raise self.error
            return true(*arguments)

        monkeypatch.setattr("hotpot.learner.scores.forward.hidden_states", hidden_states)
        monkeypatch.setattr("hotpot.learner.scores.critic.hidden_states", hidden_states)


def outcome(learner: Learner, sequences, update: int = 1, halving: Halving | None = None):
    result = learner.update(sequences, update=update, policy_version=3, halving=halving)
    return result, {name: value.clone() for name, value in learner.weights().items()}


def num_calls(sequences, **settings) -> int:
    with pytest.MonkeyPatch.context() as patch:
        memory = Memory(patch, ERRORS[0])
        outcome(make_learner(**settings), sequences)
        return memory.seen


@pytest.mark.slow
@pytest.mark.parametrize(("kl_in", "error"), [("loss", ERRORS[0]), ("reward", ERRORS[1])])
def test_wherever_memory_runs_out_the_update_is_the_same(kl_in: str, error: RuntimeError) -> None:
    sequences = make_batch()
    settings = ALL | {"kl_in": kl_in, "micro_batch_tokens": 256}
    calm, weights = outcome(make_learner(**settings), sequences)
    stages = set()
    for at in range(num_calls(sequences, **settings)):
        with pytest.MonkeyPatch.context() as patch:
            Memory(patch, error, at)
            learner = make_learner(**settings)
            result, others = outcome(learner, sequences)
        halving = result.terms.halving
        assert halving is not None
        stages.add((halving.stage, halving.step))
        assert halving.tokens_after == halving.tokens_before // 2
        np.testing.assert_allclose(result.losses, calm.losses, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result.grad_norms, calm.grad_norms, rtol=1e-5)
        for name, value in weights.items():
            # AdamW makes much of the rounding of a gradient near 0.
            assert torch.allclose(value, others[name], rtol=1e-4, atol=1e-5), name
        # Done again with memory enough: the same bits, and the same record.
        again_by = make_learner(**settings)
        again, same = outcome(again_by, sequences, halving=recorded_halving(result.terms.state))
        assert again.losses.tobytes() == result.losses.tobytes()
        assert again.grad_norms.tobytes() == result.grad_norms.tobytes()
        assert checksum(same) == checksum(others)
        assert again.terms == result.terms
        assert [step.hash for step in again.steps] == [step.hash for step in result.steps]
        assert again.num_padding_tokens == result.num_padding_tokens
    expected = {("values", 0), ("first_pass", 0), ("reference", 0), *(("step", step) for step in range(4))}
    assert stages == expected | ({("divergences", 0)} if kl_in == "reward" else set())


def test_the_gradient_of_a_halved_step_is_that_of_the_whole_one() -> None:
    sequences, found = make_batch(groups=4), []
    for fails in ((), (0,), (2,)):
        with pytest.MonkeyPatch.context() as patch:
            Memory(patch, ERRORS[1], *fails)
            learner = make_learner(minibatches=1, learning_rate=0.0)
            outcome(learner, sequences)
        found.append([parameter.grad for parameter in learner.decoder.parameters()])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)


def test_half_is_kept_carried_in_a_checkpoint_and_recorded(tmp_path) -> None:
    sequences = make_batch()
    with pytest.MonkeyPatch.context() as patch:
        Memory(patch, ERRORS[0], 3)
        learner = make_learner(epochs=2)
        first = learner.update(sequences, update=1, policy_version=3)
    assert "pass_limit" not in first.terms.state
    assert first.terms.pass_tokens == 192
    learner.save(tmp_path, {})
    resumed = make_learner(epochs=2)
    resumed.load(tmp_path)
    results = [one.update(sequences, update=2, policy_version=3) for one in (learner, resumed)]
    assert checksum(learner.weights()) == checksum(resumed.weights())
    for result in results:
        assert result.terms.pass_tokens == 96
        assert '"pass_limit":96' in result.terms.state
        assert result.terms.halving is None
    assert results[0].terms == results[1].terms
    undisturbed = make_learner(epochs=2).update(sequences, update=1, policy_version=3)
    assert "pass_limit" not in undisturbed.terms.state
    assert "halving" not in undisturbed.terms.state


def test_a_second_time_is_an_error_that_says_what_to_set() -> None:
    sequences = make_batch()
    with pytest.MonkeyPatch.context() as patch:
        Memory(patch, ERRORS[0], 3, 4)
        with pytest.raises(
            LearnerError, match=r"at most 96 tokens.*halved before.*micro_batch_tokens below 96"
        ) as raised:
            make_learner(epochs=2).update(sequences, update=1, policy_version=3)
    assert raised.value.__cause__ is ERRORS[0]


def test_passes_never_fall_below_the_longest_sequence() -> None:
    long = [make_sequence(0, sample, reward=float(sample), system=60, turns=3) for sample in range(2)]
    longest = max(len(sequence.tokens) for sequence in long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "PASS_TOKENS", 120)
        Memory(patch, ERRORS[0], 0)
        learner = make_learner(minibatches=1)
        result = learner.update(long, update=1, policy_version=3)
        assert result.terms.halving == Halving(stage="step", step=0, tokens_before=120, tokens_after=longest)
        # What is shorter next time is held to the half.
        assert learner.update(make_batch(1), update=2, policy_version=3).terms.pass_tokens == 60
    with pytest.MonkeyPatch.context() as patch:
        Memory(patch, ERRORS[0], 0)
        only = make_learner(minibatches=1, micro_batch_tokens=longest)
        with pytest.raises(
            LearnerError, match=f"longest sequence has {longest} tokens.*segment_tokens below {longest}"
        ):
            only.update(long, update=1, policy_version=3)


def test_other_errors_pass() -> None:
    for message in ("mat1 and mat2 shapes cannot be multiplied", "memory format option is only supported"):
        assert not out_of_memory(RuntimeError(message))
        with pytest.MonkeyPatch.context() as patch:
            Memory(patch, RuntimeError(message), 0)
            with pytest.raises(RuntimeError, match=message):
                make_learner().update(make_batch(1), update=1, policy_version=3)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15)
    assert out_of_memory(raised.value)


def test_a_planned_halving_is_made_where_it_was() -> None:
    budget = PassBudget(1000)
    planned = Halving(stage="step", step=2, tokens_before=1000, tokens_after=500)
    budget.begin(planned)
    sizes = [budget.attempt(int, stage="step", step=step, sequences=(), tokens=1000) for step in range(4)]
    assert sizes == [1000, 1000, 500, 500]
    assert (budget.halving, budget.carried, budget.limit) == (planned, 0, 500)
    budget.begin(None)
    assert (budget.halving, budget.carried) == (None, 500)


def work(gap_bytes: int | None, micro_batch_tokens: int = 16384, state: str = "") -> dict[str, Any]:
    """Return what a process of its own learned with no more address space than ``gap_bytes`` beyond what it had."""
    told = {"gap_bytes": gap_bytes, "micro_batch_tokens": micro_batch_tokens, "state": state}
    # What is freed goes back to the system at once, so that half of a pass needs half of the memory.
    surroundings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(told)], check=True, stdout=subprocess.PIPE, text=True, env=surroundings
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's address space")
def test_a_real_refusal_of_the_allocator_halves_the_passes() -> None:
    calm, half = work(None), work(None, micro_batch_tokens=1024)
    assert calm["halving"] is half["halving"] is None
    assert half["peak_bytes"] < 0.7 * calm["peak_bytes"], "half of a pass needs about half of the memory"
    gap = (calm["peak_bytes"] + half["peak_bytes"]) // 2
    scarce = work(gap)
    assert scarce["halving"] == ["step", 0, 2048, 1024]
    assert scarce["peak_bytes"] <= gap
    np.testing.assert_allclose(scarce["losses"], calm["losses"], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(scarce["grad_norms"], calm["grad_norms"], rtol=1e-5)
    same = ("losses", "grad_norms", "weights", "step_hashes")
    assert [scarce[name] for name in same] == [half[name] for name in same], (
        "nothing of the first try is left"
    )
    again = work(None, state=scarce["state"])
    assert again["peak_bytes"] < calm["peak_bytes"]
    assert {**again, "peak_bytes": 0} == {**scarce, "peak_bytes": 0}
