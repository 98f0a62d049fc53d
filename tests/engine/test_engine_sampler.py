"""The sampler against a brute-force reference in float64, and its frequencies against the distribution."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from hotpot.engine.embedded.sampler import sample
from hotpot.types import SamplingParams


def reference(
    logits: NDArray[np.float32], params: SamplingParams, seen: set[int]
) -> tuple[list[float], list[float]]:
    """Return the distribution sampled from and the raw model's, spelled out in float64, token by token."""
    values = [float(v) for v in logits]

    def softmax(xs: list[float]) -> list[float]:
        top = max(xs)
        weights = [math.exp(x - top) for x in xs]
        total = sum(weights)
        return [w / total for w in weights]

    model = softmax(values)
    penalty = params.repetition_penalty
    changed = [
        (v / penalty if v > 0 else v * penalty) if token in seen else v for token, v in enumerate(values)
    ]
    order = sorted(range(len(values)), key=lambda token: (-changed[token], token))
    if params.temperature == 0:
        return [float(token == order[0]) for token in range(len(values))], model
    scaled = softmax([v / params.temperature for v in changed])
    kept = order[: params.top_k] if params.top_k else order
    total = sum(scaled[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass >= params.top_p * total and nucleus:
            break
        nucleus.append(token)
        mass += scaled[token]
    total = sum(scaled[token] for token in nucleus)
    inside = set(nucleus)
    return [scaled[t] / total if t in inside else 0.0 for t in range(len(values))], model


def inverse(distribution: list[float], uniform: float) -> int:
    """Return the token whose piece of [0, 1) holds ``uniform``."""
    mass = 0.0
    for token, probability in enumerate(distribution):
        mass += probability
        if uniform < mass:
            return token
    return max(token for token, p in enumerate(distribution) if p > 0)


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=10_000),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=1e-6),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7),
    SamplingParams(temperature=0.8, top_k=12, top_p=0.8, repetition_penalty=1.2),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=2.0),
]


def label(params: SamplingParams) -> str:
    default = asdict(SamplingParams())
    return ",".join(f"{k}={v}" for k, v in asdict(params).items() if v != default[k]) or "plain"


@pytest.mark.parametrize("size", [7, 32, 350, 5000])
@pytest.mark.parametrize("params", PARAMS, ids=label)
def test_against_the_reference(params: SamplingParams, size: int) -> None:
    rng = np.random.default_rng(size)
    batch = 6
    logits = (rng.normal(size=(batch, size)) * 3).astype(np.float32)
    seen = rng.random((batch, size)) < 0.3
    uniforms = rng.random(batch)
    drawn = sample(logits, [(params, np.arange(batch))], uniforms, seen)
    for row in range(batch):
        distribution, model = reference(logits[row], params, set(np.flatnonzero(seen[row]).tolist()))
        token = int(drawn.tokens[row])
        assert token == inverse(distribution, float(uniforms[row]))
        assert drawn.behaviour_logprobs[row] == pytest.approx(math.log(distribution[token]), abs=2e-6)
        assert drawn.model_logprobs[row] == pytest.approx(math.log(model[token]), abs=2e-6)


def group_rows(params: list[SamplingParams]) -> list[tuple[SamplingParams, np.ndarray]]:
    """Return each distinct value of ``params`` with the rows that have it."""
    return [
        (value, np.array([row for row, other in enumerate(params) if other == value]))
        for value in dict.fromkeys(params)
    ]


def test_rows_of_several_parameters_match_rows_alone() -> None:
    rng = np.random.default_rng(0)
    batch = 40
    logits = rng.normal(size=(batch, 50)).astype(np.float32)
    seen = rng.random((batch, 50)) < 0.2
    uniforms = rng.random(batch)
    params = [PARAMS[index % len(PARAMS)] for index in range(batch)]
    mixed = sample(logits, group_rows(params), uniforms, seen)
    for row in range(batch):
        alone = sample(
            logits[row : row + 1],
            group_rows([params[row]]),
            uniforms[row : row + 1],
            seen[row : row + 1],
        )
        assert mixed.tokens[row] == alone.tokens[0]
        assert mixed.behaviour_logprobs[row] == alone.behaviour_logprobs[0]
        assert mixed.model_logprobs[row] == alone.model_logprobs[0]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.7, top_k=12, top_p=0.9)],
    ids=label,
)
@pytest.mark.parametrize("size", [40, 400])
def test_frequencies_follow_the_distribution(params: SamplingParams, size: int) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=size) * 1.5).astype(np.float32)
    draws = 40_000
    drawn = sample(np.tile(logits, (draws, 1)), [(params, np.arange(draws))], rng.random(draws))
    distribution, _ = reference(logits, params, set())
    expected = np.array(distribution) * draws
    counts = np.bincount(drawn.tokens, minlength=size)
    assert (counts[expected == 0] == 0).all()
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum() - 1
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def test_equal_logits_go_to_the_lower_id() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 3.0, 0.0]], dtype=np.float32)
    for params, allowed in [
        (SamplingParams(temperature=0.0), {1}),
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_p=0.4), {1, 2}),
    ]:
        tokens = {
            int(sample(logits, [(params, np.arange(1))], np.array([u])).tokens[0])
            for u in np.linspace(0, 0.9999, 50)
        }
        assert tokens == allowed


def test_the_largest_uniform_draws_the_last_token() -> None:
    # The sum of a block is rounded to float32, above or below the running sum in it: the draw must stay inside.
    logits = np.random.default_rng(0).normal(size=(500, 32)).astype(np.float32)
    drawn = sample(logits, [(SamplingParams(), np.arange(500))], np.full(500, 1 - 2.0**-53))
    assert (drawn.tokens == 31).all()


rows = arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 90)),
    elements=st.one_of(st.floats(-200, 200, width=32), st.just(-np.inf), st.sampled_from([0.0, 88.0, -88.0])),
)


@settings(max_examples=150, deadline=None)
@given(
    logits=rows,
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-40, 1e-3, 0.5, 1.0, 3.0]),
        top_p=st.sampled_from([1.0, 0.5, 1e-9]),
        top_k=st.sampled_from([0, 1, 3, 1000]),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
    ),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-53])),
)
def test_a_sampled_token_is_always_possible(logits: Any, params: SamplingParams, uniform: float) -> None:
    logits[:, 0] = np.where(np.isinf(logits).all(axis=1), 0.0, logits[:, 0])
    batch, size = logits.shape
    seen = np.zeros((batch, size), dtype=bool)
    seen[:, ::2] = True
    drawn = sample(logits, [(params, np.arange(batch))], np.full(batch, uniform), seen)
    assert ((drawn.tokens >= 0) & (drawn.tokens < size)).all()
    assert np.isfinite(drawn.behaviour_logprobs).all()
    assert np.isfinite(drawn.model_logprobs).all()
    assert (drawn.behaviour_logprobs <= 1e-6).all()
    assert (drawn.model_logprobs <= 1e-6).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_without_a_distribution_are_marked_and_touch_no_other(bad: float) -> None:
    logits = np.zeros((3, 20), dtype=np.float32)
    logits[1, 4] = bad
    for params in PARAMS:
        drawn = sample(logits, [(params, np.arange(3))], np.full(3, 0.5), np.zeros((3, 20), dtype=bool))
        assert np.isfinite(drawn.model_logprobs).tolist() == [True, False, True]
    logits[1] = -np.inf
    drawn = sample(logits, [(SamplingParams(), np.arange(3))], np.full(3, 0.5))
    assert np.isfinite(drawn.model_logprobs).tolist() == [True, False, True]


def test_a_penalty_without_context_is_an_error() -> None:
    with pytest.raises(ValueError, match="tokens seen"):
        sample(
            np.zeros((1, 3), dtype=np.float32),
            [(SamplingParams(repetition_penalty=2.0), np.arange(1))],
            np.array([0.5]),
        )
