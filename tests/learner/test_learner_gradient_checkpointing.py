"""Layers that are computed again for the gradient: the same bits, of every layout of a pass and with every critic."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from learner_cases import batch_of, make_batch, make_decoder

from hotpot.config.sections import LearnerSection
from hotpot.learner import Learner
from hotpot.learner.batches.passes import MicroBatch, lay_out
from hotpot.learner.scores.critic import Critic
from hotpot.learner.scores.forward import hidden_states, score
from hotpot.models import Policy, checksum, load_policy
from hotpot.testing.modules import KINDS, write_module


def layouts() -> dict[str, list[MicroBatch]]:
    members = batch_of(make_batch()).sequences
    return {
        "alone": [lay_out([[member]]) for member in members[:3]],
        "shared_prefix": [lay_out([[member] for member in members])],
        "packed": [lay_out([members[:4], members[4:7], members[7:]])],
        "padded": [lay_out([[member] for member in members[:5]], prefix=0)],
    }


def gradients(decoder: Policy, critic: Critic | None, micros: list[MicroBatch]) -> list[bytes]:
    for micro in micros:
        scores = score(decoder, micro, temperature=0.7, entropy_gradient=True)
        loss = (scores.logprobs * torch.arange(len(scores.logprobs))).sum() + scores.entropy.sum()
        if critic is not None:
            loss = loss + critic.values(micro, scores.hidden).square().sum()
        loss.backward()
    modules = [decoder] if critic is None else [decoder, critic]
    return [p.grad.numpy().tobytes() for module in modules for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("layout", ["alone", "shared_prefix", "packed"])
@pytest.mark.parametrize("kind", [None, "head", "separate"])
def test_gradients_have_the_same_bits(layout: str, kind, monkeypatch) -> None:
    micros, found = layouts()[layout], []
    assert any(len(micro.prefix) for micro in micros) == (layout != "alone")
    assert any(micro.starts is not None for micro in micros) == (layout == "packed")
    calls = count_layers(monkeypatch)
    for checkpointing in (False, True):
        decoder = make_decoder(qk_norm=True)
        critic = None if kind is None else Critic(decoder, kind)
        if critic is not None:
            torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
        for module in (decoder, None if critic is None else critic.decoder):
            if module is not None:
                module.gradient_checkpointing = checkpointing
        calls.number = 0
        found.append((gradients(decoder, critic, micros), calls.number))
    assert found[0][0] == found[1][0]
    assert found[1][1] == 2 * found[0][1], "each layer is computed a second time, once"


def count_layers(monkeypatch) -> SimpleNamespace:
    from hotpot.models.decoder import Attention

    calls, real = SimpleNamespace(number=0), Attention.forward

    def counted(self, *given):
        calls.number += 1
        return real(self, *given)

    monkeypatch.setattr(Attention, "forward", counted)
    return calls


def test_a_pass_without_gradient_computes_nothing_twice(monkeypatch) -> None:
    calls, decoder = count_layers(monkeypatch), make_decoder()
    decoder.gradient_checkpointing = True
    with torch.no_grad():
        score(decoder, layouts()["alone"][0], temperature=1.0)
    assert calls.number == 2


def test_an_update_has_the_same_bits() -> None:
    found = []
    for checkpointing in (False, True):
        settings = LearnerSection(
            learning_rate=1e-2, minibatches=2, epochs=2, advantages="gae", critic="separate",
            critic_extra_epochs=1, gradient_checkpointing=checkpointing,
        )  # fmt: skip
        learner = Learner(make_decoder(), settings, total_updates=4, seed=0, temperature=1.0)
        parts = [learner.decoder, learner.critic.decoder]
        assert [part.gradient_checkpointing for part in parts] == [checkpointing] * 2
        result = learner.update(make_batch(), update=1, policy_version=3)
        found.append((result.losses.tobytes(), result.grad_norms.tobytes(), checksum(learner.weights())))
    assert found[0] == found[1]


def saved_bytes(policy: Policy, micro: MicroBatch) -> int:
    """Return how much a pass keeps for the gradient beside the weights."""
    kept = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = hidden_states(policy, micro)
    assert hidden.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("kind", ["own", *KINDS])
def test_a_pass_keeps_less(kind: str, tmp_path: Path) -> None:
    policy = make_decoder() if kind == "own" else load_policy(write_module(tmp_path, kind), "transformers")
    assert policy.checkpoints
    micro = layouts()["shared_prefix" if policy.caches else "padded"][0]
    whole = saved_bytes(policy, micro)
    policy.gradient_checkpointing = True
    # Two layers keep an input each; beside them stand the embeddings' part and the last norm.
    assert saved_bytes(policy, micro) < whole / 2.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_of_transformers_has_the_same_bits(kind: str, tmp_path: Path) -> None:
    policy = load_policy(write_module(tmp_path, kind), "transformers")
    able = [name for name in layouts() if policy.caches or name in ("alone", "padded")]
    assert ("shared_prefix" in able) == (kind in ("gpt2", "gpt_neox", "cohere", "llama"))
    mixers = ("attn", "self_attn", "attention", "self_attention", "mixer")
    mixing = [module for name, module in policy.named_modules() if name.rpartition(".")[2] in mixers]
    assert len(mixing) == 2
    calls: list[str] = []
    for module in mixing:
        module.register_forward_pre_hook(lambda *_: calls.append(""))
    for layout in able:
        found = []
        for checkpointing in (False, True):
            policy.gradient_checkpointing = checkpointing
            policy.zero_grad(set_to_none=True)
            calls.clear()
            found.append((gradients(policy, None, layouts()[layout]), len(calls)))
        assert found[0][0] == found[1][0]
        assert found[1][1] == 2 * found[0][1], "each layer is computed a second time, once"
    assert policy.duplicate().state_dict().keys() == policy.state_dict().keys()
    assert not any("forward" in vars(module) for module in policy.modules())
