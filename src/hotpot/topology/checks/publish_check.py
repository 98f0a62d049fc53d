"""Whether an engine serves what is published to it: changed weights change what it says, the same ones do not.

Owns the two publishes with a probe asked before, between and after, and the words on what is wrong. Knows
only the engine's protocol; the engine it is given must serve nobody else.
"""

import numpy as np
import torch

from hotpot.engine import Engine
from hotpot.engine.probe import ask, probe_request, same
from hotpot.experience import TrainingSequence
from hotpot.learner import Learner
from hotpot.learner.scoring import score_sequences
from hotpot.models import Policy, checksum
from hotpot.types import Generation, SamplingParams, Trajectory

PERTURBATION = 1.02
"""Factor between the weights and the changed ones that are published for the test."""


def check_publish(
    engine: Engine, learner: Learner, first: Trajectory, *, sampling: SamplingParams, tolerance: float
) -> str:
    """Publish changed weights and then the learner's own on ``engine``, which serves the latter and nobody.

    Versions 1 and 2 are used up on it. Learner and its weights are not touched.
    """
    own, changed = learner.weights(), learner.policy().duplicate()
    changed.precision = torch.float32
    changed.load_state_dict({name: tensor * PERTURBATION for name, tensor in own.items()})
    other = {name: tensor.detach() for name, tensor in changed.state_dict().items()}

    def probe(number: int) -> Generation:
        limit = engine.info().max_context_tokens
        prompt = first.steps[0].prompt_tokens
        return ask(engine, probe_request(number, prompt, sampling, max_context_tokens=limit))

    before, sums = probe(0), [engine.info().checksum]
    engine.publish(other, 1)
    between = probe(1)
    sums.append(engine.info().checksum)
    engine.publish(own, 2)
    after = probe(2)
    sums.append(engine.info().checksum)
    for what, found, wanted in (
        ("changed weights", sums[1], checksum(other)),
        ("the learner's weights", sums[2], checksum(own)),
    ):
        if found != wanted:
            return (
                f"after {what} (checksum {wanted}) were published the engine says it serves {found}: it goes on with "
                "stale weights, or copies them wrongly"
            )
    if same(before, between):
        return (
            "changed weights were published and the engine's log-probabilities did not change by a bit: it reports the "
            "new weights and samples from stale ones"
        )
    if not same(before, after):
        return (
            "the first weights were published again, and the engine's tokens or log-probabilities are not what they "
            "were: it keeps something of the weights in between, such as cached keys and values"
        )
    return _of_changed(changed, first, between, tolerance)


def _of_changed(changed: Policy, first: Trajectory, answer: Generation, tolerance: float) -> str:
    prompt = first.steps[0].prompt_tokens
    tokens = np.concatenate([prompt, answer.tokens]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    zeros = np.zeros(len(tokens), np.float32)
    part = TrainingSequence(
        trajectory_id="self-test",
        group_id="self-test",
        segment=0,
        tokens=tokens,
        loss_mask=mask,
        behaviour_logprobs=zeros,
        model_logprobs=zeros,
        token_policy_version=np.where(mask, 1, -1).astype(np.int32),
        reward=0.0,
    )
    own = score_sequences(changed, [part], temperature=1.0)[0].model_logprobs
    gap = np.abs(own - answer.model_logprobs)
    at = int(gap.argmax())
    if gap[at] <= tolerance:
        return ""
    return (
        f"changed weights were published, and of the {at}. token sampled with them the engine says {answer.model_logprobs[at]:.6f}, "
        f"their model {own[at]:.6f}: more than run.self_test_tolerance = {tolerance} apart; it serves other weights than it "
        "was given"
    )
