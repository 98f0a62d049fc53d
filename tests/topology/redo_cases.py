"""Runs of many shapes, and the proof of all their updates from the first checkpoint alone."""

import shutil
from pathlib import Path

from hotpot.topology.redo import redo
from hotpot.topology.resume.checkpoints import checkpoint_folder, list_checkpoints

SHAPES = {
    "critic": (
        "learner.advantages=gae", "learner.critic=separate", "learner.critic_extra_epochs=2", "learner.gae_lambda=0.9",
        "learner.critic_learning_rate=1e-3", "learner.entropy_coefficient=0.01", "topology.updates=3",
    ),
    "epochs": ("topology.updates=8", "learner.epochs=2", "learner.final_learning_rate_share=0.25"),
    "head": (
        "learner.advantages=gae", "learner.critic=head", "learner.value_clip=0.2", "learner.epochs=2",
        "learner.gae_level=step", "topology.updates=3",
    ),
    "paid": ("learner.kl_coefficient=0.1", "learner.kl_in=reward", "learner.kl_estimator=k1", "topology.updates=2"),
    "recomputed": ("learner.old_logprobs=recomputed", "sampling.training.top_p=0.9"),
    "reference": ("learner.kl_coefficient=0.1", "learner.packing=packed", "learner.aggregation=sequence_mean"),
    "replay": ("replay.share=0.5", "replay.hot_share=0.5", "replay.weighting=positive", "topology.updates=4"),
    "segments": (
        "learner.segment_tokens=64", "learner.segment_overlap=8", "learner.old_logprobs=recomputed",
        "rollout.max_steps=6", f"prompt.system={'say what the coin shows. ' * 5}",
    ),
    "trace": (
        "learner.advantages=vtrace", "learner.critic=separate", "learner.critic_extra_epochs=1", "learner.gae_lambda=0.9",
        "replay.share=0.4", "replay.hot_share=0.5", "topology.updates=4",
    ),
    "threads": ("run.deterministic=false", "run.threads=2", "topology.updates=2"),
}  # fmt: skip


def only_first(folder: Path) -> None:
    """Delete all checkpoints but the first."""
    for update in list_checkpoints(folder)[1:]:
        shutil.rmtree(checkpoint_folder(folder, update))


def everything(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return time and size of every file of a run."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def prove(folder: Path) -> int:
    """Hold every update of a run to what was recorded, with nothing but the first checkpoint, and the run to its files."""
    only_first(folder)
    before = everything(folder)
    done = list(redo(folder, "all"))
    assert [one.update for one in done] == list(range(1, len(done) + 1))
    assert {one.way.start for one in done} == {0}
    for one in done:
        assert one.findings.differences == ()
        assert (one.findings.verdict, one.off_at, one.gone) == ("identical", None, ())
        names = {figure.name for figure in one.findings.figures}
        assert {"starting_weights", "losses[0]", "grad_norms[0]", "weights_checksum"} <= names
    assert everything(folder) == before
    return len(done)
