"""Tokens of older policies: V-trace through a whole update against one written down anew, and versions mixed in one step."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import fork_of, make_batch, make_decoder, make_sequence
from test_learner_critic import plain_values
from test_learner_gae_choices import learner_with
from test_learner_learner import make_learner, plain_logprobs, recorded_by

from hotpot.config import Recipe
from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError
from hotpot.experience import Cutting, TrainingSequence, cut_sequence
from hotpot.learner import Learner
from hotpot.learner.batches.states import Trace, estimate, piece_states
from hotpot.learner.scores.forward import score
from hotpot.learner.update import judging
from hotpot.models import checksum

TEMPERATURE = 1.25
TRACE: dict[str, Any] = {
    "advantages": "vtrace",
    "gae_lambda": 0.9,
    "discount": 0.97,
    "vtrace_rho_bar": 1.3,
    "vtrace_c_bar": 0.8,
}


def collected() -> list[TrainingSequence]:
    """What an older policy did: forks, a trajectory in two segments, one cut by a limit, some replayed, rewards on steps."""
    parts = make_batch(groups=2, samples=3, version=1)
    parts += [fork_of(parts[2], number) for number in range(2)]
    parts.append(dataclasses.replace(make_sequence(0, 1, seed=4, reward=1.0, segment=1), truncated=True))
    parts[3] = dataclasses.replace(parts[3], rewards=np.where(parts[3].loss_mask, 0.125, np.nan))
    parts[3] = dataclasses.replace(parts[3], reward=0.125 * int(parts[3].loss_mask.sum()))
    return [
        dataclasses.replace(part, replayed=number % 3 == 0, weight=0.5 if number % 3 == 0 else 1.0)
        for number, part in enumerate(recorded_by(make_decoder(5), parts, temperature=TEMPERATURE))
    ]


def tracing(kind: str, **settings: Any) -> Learner:
    section = LearnerSection(**{"critic": kind, "minibatches": 1, "learning_rate": 1e-3, **TRACE, **settings})
    learner = Learner(make_decoder(), section, total_updates=5, seed=0, temperature=TEMPERATURE)
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.head.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
    return learner


def anew(
    learner: Learner, parts: list[TrainingSequence], *, raw: bool
) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """Advantage, return, value and starting log-probability of every action token in float64, token by token."""
    s, out = learner.settings, {}
    for name in {part.trajectory_id for part in parts}:
        own = sorted((part for part in parts if part.trajectory_id == name), key=lambda part: part.segment)
        log_pi, log_mu, values, rewards, ends = [], [], [], [], []
        for part in own:
            with torch.no_grad():
                said = plain_logprobs(learner.decoder, part, TEMPERATURE).double().numpy()
                at_one = plain_logprobs(learner.decoder, part, 1.0).double().numpy()
                judged = plain_values(learner.critic, learner.decoder, part.tokens).double().numpy()
            places = np.flatnonzero(part.loss_mask)
            log_pi.append(np.stack([said, at_one])[:, places - 1])
            log_mu.append((part.model_logprobs if raw else part.behaviour_logprobs)[places].astype(float))
            values.append(judged[places - 1])
            rewards.append(np.zeros(len(places)) if part.rewards is None else part.rewards[places])
            ends.append(judged[-1] if part.truncated else 0.0)
        if own[0].rewards is None:
            rewards[-1][-1] = own[0].reward
        for number, part in enumerate(own):
            # A segment is a piece: behind its last action token stands the first value of the next.
            behind = values[number + 1][0] if number + 1 < len(own) else ends[-1]
            r = np.exp(log_pi[number][int(raw)] - log_mu[number])
            rho = np.minimum(s.vtrace_rho_bar, r)
            c = s.gae_lambda * np.minimum(s.vtrace_c_bar, r)
            v, following = np.append(values[number], behind), behind
            targets, gains = np.zeros(len(r)), np.zeros(len(r))
            for t in reversed(range(len(r))):
                earned = rewards[number][t]
                gains[t] = rho[t] * (earned + s.discount * following - v[t])
                delta = rho[t] * (earned + s.discount * v[t + 1] - v[t])
                targets[t] = following = v[t] + delta + s.discount * c[t] * (following - v[t + 1])
            out[name, part.segment] = {
                "advantages": gains, "returns": targets, "values": values[number], "start": log_pi[number][0],
            }  # fmt: skip
    return out


@pytest.mark.parametrize("kind", ["head", "separate"])
@pytest.mark.parametrize("old", ["recorded", "recomputed"])
def test_an_update_with_v_trace_is_the_one_written_down_anew(kind: str, old: str) -> None:
    parts = collected()
    learner = tracing(kind, old_logprobs=old)
    expected = anew(learner, parts, raw=old == "recomputed")
    result = learner.update(parts, update=1, policy_version=7)
    weight = {part.trajectory_id: part.weight for part in parts}
    policy = value = 0.0
    for row in result.learned:
        on, of = row.loss_mask > 0, expected[row.trajectory_id, row.segment]
        for column, name in (
            ("advantages", "advantages"), ("returns", "returns"), ("old_logprobs", "start"), ("new_logprobs", "start"),
        ):  # fmt: skip
            np.testing.assert_allclose(getattr(row, column)[on], of[name], rtol=0, atol=2e-5)
            assert not getattr(row, column)[~on].any()
        # At the start the ratio is 1 and nothing is clipped: the truncated ratio counts once, in the advantage.
        policy -= weight[row.trajectory_id] * of["advantages"].sum()
        value += weight[row.trajectory_id] * 0.5 * ((of["values"] - of["returns"]) ** 2).sum()
    assert result.policy_losses[0] == pytest.approx(policy / result.num_loss_tokens, abs=1e-5)
    assert result.value_losses[0] == pytest.approx(value / result.num_loss_tokens, abs=1e-5)
    assert result.ratio_mean == 1.0
    assert result.terms.proximal_policy_version == 7
    far = [np.exp(of["start"]) for of in expected.values()]
    assert np.ptp(np.concatenate(far)) > 0.1


def test_behind_a_cut_every_window_is_traced_by_itself_and_only_a_value_crosses() -> None:
    whole = dataclasses.replace(make_sequence(turns=20, reward=2.0), truncated=True)
    pieces = cut_sequence(whole, Cutting(segment_tokens=64, overlap=24))
    states = piece_states(pieces, "token")
    assert len(states) > 2
    rng = np.random.default_rng(2)
    values = [rng.normal(size=state.num_values) for state in states]
    ratios = [rng.normal(size=len(state.places)) for state in states]
    trace = Trace(log_ratios=ratios, rho_bar=1.3, c_bar=0.8)
    found = estimate(states, values, discount=0.97, gae_lambda=0.9, trace=trace)
    first_held = {}
    for state, value in zip(states, values, strict=True):
        for number, one in zip(state.decisions.tolist(), value.tolist(), strict=False):
            first_held.setdefault(number, one)
    for state, value, ratio in zip(states, values, ratios, strict=True):
        last = int(state.decisions[-1])
        following = behind = first_held.get(last + 1, float(value[-1]))
        rho, c = np.minimum(1.3, np.exp(ratio)), 0.9 * np.minimum(0.8, np.exp(ratio))
        for t in reversed(range(len(ratio))):
            earned = 2.0 if state.decisions[t] == max(first_held) else 0.0
            gain = rho[t] * (earned + 0.97 * following - value[t])
            delta = rho[t] * (earned + 0.97 * behind - value[t])
            following = value[t] + delta + 0.97 * c[t] * (following - behind)
            behind = value[t]
            assert found[state.key].advantages[t] == pytest.approx(gain)
            assert found[state.key].returns[t] == pytest.approx(following)


def test_on_policy_v_trace_teaches_its_critic_what_gae_does() -> None:
    parts = recorded_by(make_decoder(), make_batch(), temperature=TEMPERATURE)
    settings = {"vtrace_rho_bar": 1.0, "vtrace_c_bar": 1.0, "value_coefficient": 0.5}
    traced = tracing("head", **settings).update(parts, update=1, policy_version=3)
    plain = tracing(
        "head", **{**settings, "advantages": "gae"}
    ).update(parts, update=1, policy_version=3)  # fmt: skip
    for one, other in zip(traced.learned, plain.learned, strict=True):
        np.testing.assert_allclose(one.returns, other.returns, atol=1e-4)
    assert traced.value_loss == pytest.approx(plain.value_loss, rel=1e-4)
    assert traced.agreement.maximum < 1e-5


def test_masked_values_and_the_order_of_arrival_change_no_bit_of_v_trace() -> None:
    outcomes = []
    for turn in range(3):
        parts = collected()
        if turn == 1:
            parts = [
                dataclasses.replace(
                    part,
                    behaviour_logprobs=np.where(part.loss_mask, part.behaviour_logprobs, np.nan),
                    model_logprobs=np.where(part.loss_mask, part.model_logprobs, np.inf),
                )
                for part in parts
            ]
        elif turn == 2:
            parts = parts[::-1]
        learner = tracing("separate", minibatches=2)
        result = learner.update(parts, update=1, policy_version=7)
        outcomes.append((result.batch_hash, result.losses.tobytes(), checksum(learner.weights())))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    moved = collected()
    at = int(np.flatnonzero(moved[1].loss_mask)[0])
    moved[1].behaviour_logprobs[at] -= 0.5
    other = tracing("separate", minibatches=2).update(moved, update=1, policy_version=7)
    assert other.batch_hash != outcomes[0][0]


def test_the_ratios_of_v_trace_are_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """No minibatch is scored once more, and what is recorded is what the ratios were made of."""
    counted: list[str] = []
    for place in ("update.steps", "scores.starting"):
        module = f"hotpot.learner.{place}.score"
        monkeypatch.setattr(module, _counting(module, counted))
    tracing("separate", minibatches=4).update(collected(), update=1, policy_version=7)
    assert counted.count("hotpot.learner.scores.starting.score") == 1
    assert counted.count("hotpot.learner.update.steps.score") == 4


def _counting(module: str, counted: list[str]) -> Any:
    def scored(*given: Any, **told: Any) -> Any:
        counted.append(module)
        return score(*given, **told)

    return scored


# ---- versions mixed in one step ----


def swapped(part: TrainingSequence, versions: list[int]) -> TrainingSequence:
    """The trajectory with its sampled tokens spread over ``versions`` in order, so that its longest step has several."""
    places = np.flatnonzero(part.loss_mask)
    found = np.full(len(part.tokens), -1, dtype=np.int32)
    found[places] = np.array(versions)[np.arange(len(places)) * len(versions) // len(places)]
    return dataclasses.replace(part, token_policy_version=found)


def one_step(versions: list[int], sample: int = 0) -> TrainingSequence:
    """A trajectory of one step, all of whose tokens were sampled in one go."""
    part = make_sequence(0, sample, turns=1, seed=7, reward=float(sample))
    assert part.loss_mask.sum() >= len(versions)
    return swapped(part, versions)


def test_tokens_of_three_versions_in_one_step_are_as_stale_as_each_is() -> None:
    parts = [one_step([3, 4, 5], 0), one_step([3, 4, 5], 1)]
    result = make_learner().update(parts, update=9, policy_version=7)
    ages = np.concatenate([7 - part.token_policy_version[part.loss_mask] for part in parts])
    assert set(ages.tolist()) == {2, 3, 4}
    assert (result.staleness_max, result.staleness_mean) == (4, pytest.approx(ages.mean()))
    assert result.agreement.num_tokens == 0
    with pytest.raises(LearnerError, match="policy version 4 was given tokens of version 5"):
        make_learner().update(parts, update=9, policy_version=4)


@pytest.mark.parametrize("decoupled", ["stale", "all"])
def test_each_token_of_a_mixed_step_is_decoupled_by_its_own_version(decoupled: str) -> None:
    parts = recorded_by(make_decoder(5), [one_step([5, 6, 7], 0), one_step([5, 6, 7], 1)])
    learner = make_learner(decoupled=decoupled, minibatches=1, importance_cap=1.5)
    with torch.no_grad():
        start = [plain_logprobs(learner.decoder, part).numpy() for part in parts]
    result = learner.update(parts, update=9, policy_version=7)
    loss = tokens = 0.0
    for part, said, row in zip(parts, start, result.learned, strict=True):
        on = part.loss_mask
        apart = (part.token_policy_version[on] < 7) | (decoupled == "all")
        new, recorded = said[on[1:]], part.behaviour_logprobs[on]
        np.testing.assert_allclose(row.old_logprobs[on], np.where(apart, new, recorded), atol=1e-5)
        ratio, gain = np.exp(np.where(apart, 0, new - recorded)), part.reward - 0.5
        counts = np.where(apart, np.minimum(np.exp(new - recorded), 1.5), 1)
        loss -= (np.minimum(ratio * gain, ratio.clip(0.8, 1.2) * gain) * counts).sum()
        tokens += on.sum()
    assert result.losses[0] == pytest.approx(loss / tokens, abs=1e-5)


def test_a_token_behind_a_swap_in_the_midst_of_its_step_is_not_compared_with_the_learner() -> None:
    """An engine goes on with the keys and values of the old weights: no version says what was recorded there."""
    mixed, whole = one_step([5, 7], 0), one_step([7], 1)
    long = swapped(make_sequence(0, 2, turns=3, seed=2), [5, 7])
    result = make_learner().update([mixed, whole, long], update=9, policy_version=7)
    places = np.flatnonzero(long.loss_mask)
    steps = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    pure = [step for step in steps if (long.token_policy_version[step] == 7).all()]
    assert 0 < len(pure) < len(steps)
    assert result.agreement.num_tokens == whole.loss_mask.sum() + sum(map(len, pure))


def test_v_trace_takes_each_token_by_its_own_recorded_log_probability_whatever_its_version() -> None:
    parts = collected()
    mixed = [swapped(part, [3, 4, 5]) if part.loss_mask.sum() > 2 else part for part in parts]
    one, two = (tracing("head").update(given, update=1, policy_version=7) for given in (parts, mixed))
    assert one.losses.tobytes() == two.losses.tobytes()
    assert (one.staleness_max, two.staleness_max) == (6, 4)
    assert two.staleness_mean < one.staleness_mean


# ---- what is refused, and what no more ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantages": "vtrace"}, "set learner.advantages = 'gae' and learner.critic"),
        ({"vtrace_rho_bar": 2.0}, "learner.vtrace_rho_bar = 2 is a bound of V-trace"),
        ({**TRACE, "critic": "head", "vtrace_c_bar": 1.5}, "needs the latter to be as large at least"),
        ({**TRACE, "critic": "head", "gae_level": "step"}, "set gae_level = 'token'"),
        ({**TRACE, "critic": "head", "decoupled": "all"}, "by its ratio twice"),
        ({**TRACE, "critic": "head", "replayed_ratio_cap": 2.0}, "by its ratio twice"),
        ({**TRACE, "critic": "head", "reward_normalization": "batch"}, "advantage_normalization"),
    ],
)
def test_what_v_trace_can_not_go_with_is_refused_with_a_remedy(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerSection(**settings)


def test_v_trace_needs_no_group_and_may_replay() -> None:
    traced = {**TRACE, "critic": "separate"}
    Recipe(learner=traced, rollout={"samples_per_task": 1}, replay={"share": 0.3})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="learns from every group"):
        Recipe(learner=traced, rollout={"refill": "until_signal"})  # type: ignore[arg-type]
    LearnerSection(**traced, precision="bfloat16")


def test_passes_are_halved_at_the_starting_log_probabilities_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = judging.starting_logprobs, []

    def short(*given: Any, max_tokens: int, **told: Any) -> Any:
        calls.append(max_tokens)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return real(*given, max_tokens=max_tokens, **told)

    whole = learner_with("separate", advantages="vtrace").update(collected(), update=1, policy_version=7)
    monkeypatch.setattr(judging, "starting_logprobs", short)
    halved = learner_with("separate", advantages="vtrace").update(collected(), update=1, policy_version=7)
    assert halved.terms.halving is not None
    assert (halved.terms.halving.stage, calls[1]) == ("starting", calls[0] // 2)
    assert halved.loss == pytest.approx(whole.loss, abs=1e-6)
