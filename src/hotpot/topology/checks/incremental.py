"""How far an engine's incremental computation is from computing the whole context in one go.

A later step of an episode reuses what earlier ones computed. Some such steps of a run are asked for again, from an engine
that holds nothing: the same context, the same random numbers. Owns the choice of the steps and the comparison.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.engine import Engine
from hotpot.engine.probe import PROBE_TOKENS, ask, gaps
from hotpot.models import Weights
from hotpot.types import GenerationRequest, Purpose, SampleKey, SamplingParams, StepRow, Trajectory

NUM_STEPS = 4
"""Steps that are asked for again, those that reused most first, of different trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncrementalDifference:
    """The largest difference in nats over ``num_tokens`` tokens of ``num_steps`` steps, None where none was comparable.

    ``num_steps_other``: steps whose first token came out as another one, so that nothing could be compared (its random
    number fell on a boundary, or the difference is large). ``worst`` names the step of the largest difference.
    """

    largest: float | None
    num_steps: int
    num_tokens: int
    num_steps_other: int
    worst: str

    def problem(self, tolerance: float) -> str:
        """Return in words what is wrong, "" where the differences are rounding, at most ``tolerance`` nats."""
        if self.largest is not None and self.largest > tolerance:
            return (
                f"{self.worst}: computed in one go, its log-probabilities are up to {self.largest:.3g} nats from those that the "
                f"engine computed on top of earlier steps; more than run.self_test_tolerance = {tolerance}. The engine reuses "
                "what it must not (stale or another prefix), or loses precision on the way"
            )
        if self.num_steps > 1 and self.num_steps_other == self.num_steps:
            return (
                f"{self.num_steps} steps, computed in one go with the same random numbers, begin with other tokens than on "
                "record: the engine reuses what it must not, or its random numbers hang on more than the request"
            )
        return ""


NOT_MEASURED = IncrementalDifference(largest=None, num_steps=0, num_tokens=0, num_steps_other=0, worst="")
"""Where nothing was asked."""


def measure_incremental(
    engine: Engine,
    weights: Weights,
    trajectories: Sequence[Trajectory],
    *,
    versions: Collection[int],
    sampling: SamplingParams,
) -> IncrementalDifference:
    """Ask ``engine`` again for steps of ``trajectories`` that policy ``versions`` sampled, all of them with ``weights``.

    Where it has something left of an earlier question they are published anew, which takes a version and makes it forget.
    Costs :data:`NUM_STEPS` whole contexts and a few tokens of each.
    """
    largest: float | None = None
    worst, num_tokens, others = "", 0, 0
    chosen = _incremental_steps(trajectories, versions)
    for number, (step, context) in enumerate(chosen):
        answer = ask(engine, _again(number, step, context, sampling))
        if answer.report.reused_tokens:
            engine.publish(weights, engine.info().policy_version + 1)
            answer = ask(engine, _again(number, step, context, sampling))
        gap = gaps(answer, step.sampled_tokens, step.model_logprobs)
        if not len(gap):
            others += 1
            continue
        num_tokens += len(gap)
        if largest is None or gap.max() > largest:
            largest, worst = float(gap.max()), f"trajectory {step.trajectory_id}, step {step.step}"
    return IncrementalDifference(
        largest=largest, num_steps=len(chosen), num_tokens=num_tokens, num_steps_other=others, worst=worst
    )


def _incremental_steps(
    trajectories: Sequence[Trajectory], versions: Collection[int]
) -> list[tuple[StepRow, NDArray[np.int32]]]:
    """Return the step of each trajectory that reused most, with its whole context, the largest first."""
    found = []
    for trajectory in trajectories:
        steps = [
            step
            for step in trajectory.steps
            if step.reused_tokens and set(step.span_policy_version) <= {*versions}
        ]
        if steps:
            step = max(steps, key=lambda one: one.reused_tokens)
            found.append((step, _context(trajectory, step)))
    return sorted(found, key=lambda pair: -pair[0].reused_tokens)[:NUM_STEPS]


def _context(trajectory: Trajectory, step: StepRow) -> NDArray[np.int32]:
    """Return every token the model saw before ``step``, int32 ``[step.context_tokens]``."""
    before = [one for one in trajectory.steps[: step.step] if one.segment == step.segment]
    pieces = [tokens for one in before for tokens in (one.prompt_tokens, one.sampled_tokens)]
    return np.concatenate([*pieces, step.prompt_tokens]).astype(np.int32)


def _again(
    number: int, step: StepRow, context: NDArray[np.int32], sampling: SamplingParams
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"incremental:{number}",
        session_id=f"incremental:{number}",
        prompt=context,
        stop_tokens=(),
        max_tokens=min(len(step.sampled_tokens), PROBE_TOKENS),
        purpose=Purpose.TRAINING,
        sampling=sampling,
        key=SampleKey(seed=step.seed, issue=step.issue, sample=step.sample, step=step.step),
        sender="self-test",
    )
