"""Both sides in turn: whole iterations, and the learning of one given batch."""

import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotpot.models import use_threads
from learner_parts.hotpot_side import Completion, HotpotSide
from learner_parts.trl_side import Rollout, train
from learner_parts.turns import TRIALS, Spent, Turns, thread_counts, times_as_fast
from learner_parts.work import Work


def whole(work: Work, folder: Path, rounds: int, *, trials: int = TRIALS) -> dict[str, Any]:
    """Measure whole iterations; return rates, their ratio, thread counts and the share of padding."""
    side = HotpotSide(work)
    ours, theirs = _alternate(side, folder, rounds, trials, side)
    _show("iteration", ours, theirs)
    by_wall, by_cpu = times_as_fast(ours, theirs)
    return {
        "over_trl": round(by_wall, 3),
        "cpu_over_trl": round(by_cpu, 3),
        "samples_per_s": {
            "hotpot": round(work.completions / ours.median, 2),
            "trl": round(work.completions / theirs.median, 2),
        },
        "threads": {"hotpot": ours.best, "trl": theirs.best},
        "padding_share": round(statistics.fmean(side.padding_shares), 4),
    }


def learning(work: Work, folder: Path, rounds: int, *, trials: int = TRIALS) -> dict[str, Any]:
    """Measure the learning of one batch, again and again, on both sides."""
    side = HotpotSide(work)
    completions = side.generate()
    sequences = side.sequences(completions)

    def learn() -> Spent:
        return side.timed(sequences)

    ours, theirs = _alternate(side, folder, rounds, trials, learn, rollout=_given(completions))
    _show("learning", ours, theirs)
    by_wall, by_cpu = times_as_fast(ours, theirs)
    return {"learner_over_trl": round(by_wall, 3), "learner_cpu_over_trl": round(by_cpu, 3)}


def _alternate(
    side: HotpotSide,
    folder: Path,
    rounds: int,
    trials: int,
    iterate: Callable[[], Spent],
    rollout: Rollout | None = None,
) -> tuple[Turns, Turns]:
    """Return the turns of both; with ``rollout`` only TRL's learning counts."""
    work, counts = side.work, thread_counts()
    prompts = [side.tokenizer.decode(side.prompt(index)) for index in range(len(work.openings))]
    ours, theirs = (Turns(counts=counts, rounds=rounds, trials=trials) for _ in range(2))

    def turn(iteration: Spent, its_learning: Spent) -> None:
        theirs.take(iteration if rollout is None else its_learning)
        use_threads(ours.threads)
        ours.take(iterate())
        use_threads(theirs.threads)

    use_threads(theirs.threads)
    with warnings.catch_warnings():  # what TRL and transformers warn of is theirs
        warnings.simplefilter("ignore")
        train(work, folder / "trl", prompts, iterations=theirs.total, turn=turn, rollout=rollout)
    return ours, theirs


def _given(completions: list[Completion]) -> Rollout:
    """Return a rollout that answers the same completions whatever it is asked."""
    prompts = [completion.request.prompt.tolist() for completion in completions]
    answers = [completion.generation.tokens.tolist() for completion in completions]

    def rollout(asked: list[Any], _trainer: Any) -> dict[str, Any]:
        assert len(asked) == len(answers)
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": None}

    return rollout


def _show(what: str, ours: Turns, theirs: Turns) -> None:
    for name, side in (("hotpot", ours), ("trl", theirs)):
        tried = ", ".join(f"{seconds:.3f} s with {count}" for count, seconds in side.tried.items())
        rounds = " ".join(f"{spent.wall_s:.3f} ({spent.cpu_s:.3f})" for spent in side.counted)
        print(
            f"{what}, {name}: threads tried: {tried or 'none'}; rounds with {side.best}: {rounds} s (processor)",
            flush=True,
        )
