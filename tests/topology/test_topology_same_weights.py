"""Weights that a resume serves under a new policy version: what they sampled before is no staler for it."""

from collections.abc import Callable
from typing import Any

import pytest
from flow_parts import QUICK, wired

from hotpot.config import Recipe
from hotpot.testing.records import make_trajectory
from hotpot.topology import async_
from hotpot.topology.resume.left import Left
from hotpot.topology.updates.batch import UpdateBatch


def test_the_learner_takes_tokens_of_an_earlier_number_of_its_weights_for_its_own(
    recipe: Callable[..., Recipe],
) -> None:
    with wired(recipe(*QUICK)) as (session, _):
        first = session.progress.policy_version
        session.adopt(1, "the same")
        session.adopt(2, "the same")
        assert session.same_weights() == {first + 1: first + 2}
        # Nothing in the trajectories says so: their steps name the checksum of what sampled their first tokens only.
        found = [make_trajectory(issue=issue, policy_version=first + issue) for issue in range(3)]
        batch = session.draw(UpdateBatch(update=3, collected=found))
        learned = [set(part.token_policy_version[part.loss_mask].tolist()) for part in batch.sequences()]
        assert learned == [{first}, {first + 2}, {first + 2}]


class Enough(Exception):
    """The queue was made; the run need not go on."""


@pytest.mark.parametrize(("left", "told"), [((7,), True), ((), False)])
def test_what_an_earlier_process_left_waits_no_staler_for_it_in_the_queue(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, left: tuple[int, ...], told: bool
) -> None:
    asked: list[Any] = []

    def make(*_: Any, aliases: Any, **__: Any) -> Any:
        asked.append(aliases)
        raise Enough

    monkeypatch.setattr(async_, "TrajectoryQueue", make)
    with wired(recipe(*QUICK)) as (session, _):
        first = session.progress.policy_version
        session.adopt(1, "the same")
        session.adopt(2, "the same")
        session.left = Left(issues=left)
        with pytest.raises(Enough):
            async_.run_async(session)
    assert asked == [{first + 1: first + 2} if told else None]
