"""The warm start learns what it is shown, and stops before a value that is not finite reaches the weights."""

import math

import pytest
import torch
from learner_cases import make_batch, make_decoder

from hotpot.config.sections import WarmstartSection
from hotpot.errors import LearnerError
from hotpot.learner.imitation import imitate
from hotpot.models import checksum

SETTINGS = WarmstartSection(steps=8)


def test_the_loss_falls() -> None:
    losses = imitate(make_decoder(), [make_batch()] * 8, SETTINGS)
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5


def test_a_loss_that_is_not_finite_leaves_the_weights_alone() -> None:
    decoder = make_decoder()
    with torch.no_grad():
        decoder.norm.weight[0] = math.nan
    before = checksum(decoder.state_dict())
    with pytest.raises(LearnerError, match="loss nan"):
        imitate(decoder, [make_batch()], SETTINGS)
    assert checksum(decoder.state_dict()) == before


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(broken: float) -> None:
    decoder = make_decoder()
    decoder.norm.weight.register_hook(lambda gradient: gradient * broken)
    before = checksum(decoder.state_dict())
    with pytest.raises(LearnerError, match=r"step 0 has loss \d.* gradient norm (inf|nan)"):
        imitate(decoder, [make_batch()], SETTINGS)
    assert checksum(decoder.state_dict()) == before
