"""What one environment step costs the processor, with few and with many episodes under way at once.

The real Rollout, Episodes and recorder, with the fake engine (it "samples" from a script, so no model is in the figures) and
the coin environment of `hotpot.testing`: five steps an episode. Two ways of calling it: `threads` (ThreadActors, eight actors,
each call really waits by LAW) and `inline` (InlineActors, no wait). Each figure is the processor time of the whole
process, from the first episode's beginning to the last one's end, over the steps taken; a process of its own for each,
in turns, ROUNDS times, medians. `growth` is the figure with MANY episodes at once over that with FEW; the last line has
the worse of the two ways. LAW is injected: nothing here waits but for it.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from hotpot.config import ActorsSection, RolloutSection
from hotpot.envs import BoundEnvironment, load_environment
from hotpot.experience.log.ledger import Lease
from hotpot.models import seldom_collected, train_tokenizer
from hotpot.rollout import ONLY, Dialect, Mix, Provenance, Rollout, Scene, TaskSampler
from hotpot.rollout.actors import InlineActors, ThreadActors
from hotpot.rollout.collection import even_places
from hotpot.testing.engine import FakeEngine, Script
from hotpot.timeline import Timeline
from hotpot.types import Action, Purpose, SamplingParams, ToolCall

FEW, MANY = 64, 4096
ROUNDS = int(os.environ.get("ROUNDS", "3"))
LAW = {"kind": "lognormal", "mean_s": 4.0, "sigma": 0.5, "longest_s": 20.0}
CALLS = 4
"""Calls of an episode, before its answer."""
EPISODES = {("threads", FEW): 128, ("threads", MANY): 8192, ("inline", FEW): 2048, ("inline", MANY): 8192}
MAX_MS, MAX_GROWTH = 1.0, 1.2


class Unkept:
    """An attempt log that keeps nothing: the ledger's cost is measured elsewhere."""

    def lease(self, leases: Sequence[Lease]) -> None:
        """Keep nothing."""

    def fail(self, attempt_id: str, reason: str) -> None:
        """End the measurement: nothing may fail in it."""
        raise SystemExit(f"attempt {attempt_id} failed: {reason}")

    drop = fail


def measure(way: str, episodes_at_once: int) -> dict[str, float]:
    """Run episodes and return what a step cost."""
    environment = load_environment(
        "hotpot.testing.latency:COIN", {"latency": LAW if way == "threads" else {}}
    )
    dialect = Dialect(
        train_tokenizer(["coin heads tails peek", "say what the coin shows."] * 5, vocab_size=320)
    )
    peek = dialect.encode_action(Action(tool_call=ToolCall(name="peek", arguments="{}"))).tolist()
    answer = dialect.encode_action(Action(answer="heads")).tolist()
    told = dialect.tokenizer.special_ids["<|tool|>"]

    def script(prompt: np.ndarray) -> Iterable[int]:
        return peek if np.count_nonzero(prompt == told) < CALLS else answer

    rollout = make_rollout(way, episodes_at_once, script, environment, dialect)
    sampler = TaskSampler(Mix.of(environment), seed=7, samples_per_task=16)
    plans = sampler.issue(EPISODES[way, episodes_at_once] // 16)
    steps = 0
    gc.collect()
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    with seldom_collected():  # as in every run
        for trajectories in rollout.collect(plans, Purpose.TRAINING):
            steps += sum(len(one.steps) for one in trajectories)
    cpu_s, wall_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
    threads = threading.active_count()
    rollout.close()
    if steps != len(plans) * (CALLS + 1):
        raise SystemExit(f"{steps} steps of {len(plans)} episodes; each takes {CALLS + 1}")
    return {"cpu_ms": 1e3 * cpu_s / steps, "steps": steps, "wall_s": wall_s, "threads": threads}


def make_rollout(
    way: str, episodes_at_once: int, script: Script, environment: BoundEnvironment, dialect: Dialect
) -> Rollout:
    sampling = {purpose: SamplingParams() for purpose in Purpose}
    settings = ActorsSection(kind="threads", actors_per_group=8)
    makers = {ONLY: environment.make}
    actors = ThreadActors(makers, settings) if way == "threads" else InlineActors(makers, settings)
    provenance = Provenance(
        run_id="bench",
        seed=7,
        actor_id="",
        actor_group="",
        env_version=environment.env_version.version,
        reward_version=environment.reward_version.version,
        prompt_version="",
    )
    scene = Scene(environment=environment, system_prompt="say what the coin shows.", provenance=provenance)
    return Rollout(
        FakeEngine(script, sampling=sampling, max_concurrency=episodes_at_once),
        {ONLY: scene},
        dialect,
        RolloutSection(),
        sampling=sampling,
        attempts=Unkept(),
        redact=lambda text: (text, 0),
        timeline=Timeline(),
        actors=actors,
        places=even_places(["group-0"], episodes_at_once),
    )


def main() -> None:
    found: dict[tuple[str, int], list[float]] = {case: [] for case in EPISODES}
    for round_ in range(ROUNDS):
        for way, episodes_at_once in EPISODES:
            command = [sys.executable, __file__, way, str(episodes_at_once)]
            line = json.loads(subprocess.check_output(command))
            found[way, episodes_at_once].append(line["cpu_ms"])
            print(
                f"round {round_}: {way:7} {episodes_at_once:5} at once: {line['cpu_ms']:.3f} ms a step "
                f"({line['steps']} steps, {line['threads']} threads, {line['wall_s']:.1f} s)",
                flush=True,
            )
    middle = {case: statistics.median(values) for case, values in found.items()}
    result = {
        "cpu_ms_per_step": round(max(middle[way, MANY] for way in ("threads", "inline")), 4),
        "growth": round(max(middle[way, MANY] / middle[way, FEW] for way in ("threads", "inline")), 4),
    }
    print(json.dumps(result))
    if result["cpu_ms_per_step"] > MAX_MS or result["growth"] > MAX_GROWTH:
        sys.exit(1)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
