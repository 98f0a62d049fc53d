"""The run as a whole: its seed, its checkpoints, its halves."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from hotpot.config.sections.base import NonNegativeInt, PositiveFloat, PositiveInt, Section

SELF_TEST_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""What ``run.self_test_tolerance`` is where it is unset, by the precision that the learner computes in."""


class RunSection(Section):
    """The run as a whole."""

    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")
    """Id of the run and name of its folder; by default the recipe's name and the time."""
    folder: Path = Path("runs")
    """Folder that holds the run folders."""
    seed: NonNegativeInt = 0
    """Seed of everything random in the run: tasks, sampling, minibatch order."""
    deterministic: bool = False
    """Same seed, same bits on the same kind of machine: one thread, no decision that hangs on the clock. Where Hotpot's own
    decoder samples and learns in float32 (no adapters, rows padded), both compute every log-probability alike, bit for bit
    (see docs/logprobs.md)."""
    threads: NonNegativeInt = 0
    """Threads for tensor computation; 0 takes the count measured best for the model (see docs/performance.md)."""
    trace: bool = True
    """Write trace.json, which Perfetto opens."""
    self_test: bool = True
    """Test the set-up on the first batch of every start and resume, before anything is learned from it."""
    self_test_tolerance: PositiveFloat | None = None
    """Largest |learner - sampler| log-probability in nats that the self-test takes for rounding; unset is 0.001, where the
    learner computes in bfloat16 0.5, and in deterministic mode 0 where both promise the same bits."""


class CheckpointSection(Section):
    """Weights and optimiser state on disk."""

    every_updates: NonNegativeInt = 10
    """Updates between checkpoints; 0 keeps only the last one."""
    keep: PositiveInt = 3
    """Checkpoints kept besides the first and the last."""
    accept_changed: tuple[Literal["env", "reward", "prompt"], ...] = ()
    """Versions that may be others in a resume although no setting asks for it (the environment's code or data changed)."""


class DebugSection(Section):
    """Ways to run one half of the loop."""

    mode: Literal["train", "rollout_only", "learn_from_record"] = "train"
    """Everything; or collect and store without learning; or learn from the stored trajectories of source_run."""
    source_run: Path | None = None
    """Run folder whose training trajectories learn_from_record uses."""

    @model_validator(mode="after")
    def _source_belongs_to_mode(self) -> Self:
        if (self.mode == "learn_from_record") != (self.source_run is not None):
            raise ValueError("debug.source_run is set exactly when debug.mode is learn_from_record")
        return self
