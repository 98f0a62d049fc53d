"""A recorded update out of the record alone: the same batch, and learned again the same bits."""

import dataclasses

import numpy as np
import pytest

from hotpot.config.load import build_recipe
from hotpot.errors import UsageError
from hotpot.experience import RunReader
from hotpot.learner import Learner
from hotpot.models import checksum, load_decoder
from hotpot.topology.resume.checkpoints import checkpoint_folder
from hotpot.topology.resume.history import last_recipe
from hotpot.topology.resume.rebuild import compare, policy_checksums, rebuild_batch, recorded_update, relearn


def learner_of(folder) -> Learner:
    """A learner of the run in ``folder``, as it began."""
    recipe = build_recipe(last_recipe(folder), [], origin="test")
    first = checkpoint_folder(folder, 0)
    learner = Learner(
        load_decoder(first), recipe.learner, total_updates=recipe.topology.updates, seed=recipe.run.seed,
        temperature=recipe.sampling.training.temperature, exact=recipe.run.deterministic,
    )  # fmt: skip
    learner.load(first)
    return learner


@pytest.mark.parametrize(
    "overrides",
    [
        ("learner.final_learning_rate_share=0.5",),
        ("replay.share=0.5", "replay.hot_share=0.5", "replay.weighting=positive", "topology.updates=4"),
        ("learner.old_logprobs=recomputed", "learner.epochs=2", "sampling.training.top_p=0.9"),
        (
            "learner.advantages=gae", "learner.critic=separate", "learner.critic_extra_epochs=1",
            "learner.advantage_normalization=running",
        ),
        ("learner.advantages=gae", "learner.critic=head", "learner.entropy_coefficient=0.01"),
    ],
)  # fmt: skip
def test_every_update_is_learned_again_from_the_record(run, overrides) -> None:
    folder = run(*overrides)
    reader, learner = RunReader.open(folder), learner_of(folder)
    updates = reader.table("updates", ["update"])["update"].to_pylist()
    sums = policy_checksums(reader)
    for before, number in enumerate(updates):
        row, batch = recorded_update(reader, number), rebuild_batch(reader, number)
        assert len(batch.collected) == 16
        result = relearn(learner, batch, policy_version=row.policy_version, before=before)
        found = compare(row, result)
        assert (found.differences, found.same_batch, found.close) == ((), True, True)
        assert checksum(learner.weights()) == sums[row.new_policy_version]
        assert row.value_losses.tobytes() == result.value_losses.tobytes()
        assert (row.explained_variance, row.learner_state) == (result.explained_variance, result.terms.state)
        assert (result.staleness_mean, result.agreement.maximum) == (
            row.staleness_mean,
            row.logprob_difference_max,
        )


def test_what_differs_is_named(run) -> None:
    folder = run("topology.updates=1")
    reader = RunReader.open(folder)
    row, batch = recorded_update(reader, 1), rebuild_batch(reader, 1)
    fewer = dataclasses.replace(batch, collected=batch.collected[:-1])
    found = compare(row, relearn(learner_of(folder), fewer, policy_version=row.policy_version, before=0))
    assert not found.same_batch
    assert found.differences[0].startswith("batch_hash is ")
    rounded = dataclasses.replace(row, losses=row.losses * (1 + 1e-9))
    found = compare(rounded, relearn(learner_of(folder), batch, policy_version=row.policy_version, before=0))
    assert (found.same_batch, found.close, len(found.differences)) == (True, True, 1)
    far = dataclasses.replace(row, losses=row.losses + 0.5)
    found = compare(far, relearn(learner_of(folder), batch, policy_version=row.policy_version, before=0))
    assert (found.same_batch, found.close) == (True, False)
    with pytest.raises(UsageError, match="has no update 7"):
        rebuild_batch(reader, 7)


def test_tokens_of_an_equal_policy_are_of_today(run) -> None:
    batch = rebuild_batch(RunReader.open(run("topology.updates=1")), 1)
    (version,) = {int(v) for s in batch.sequences() for v in s.token_policy_version[s.loss_mask]}
    renamed = dataclasses.replace(batch, aliases={version: 9})
    for before, after in zip(batch.sequences(), renamed.sequences(), strict=True):
        assert np.array_equal(after.token_policy_version[after.loss_mask], np.full(after.loss_mask.sum(), 9))
        assert np.array_equal(before.tokens, after.tokens)
