"""Rewards of recorded trajectories recomputed by another function: a new reward version over old experience.

Owns what such a function is given, how it is found and versioned, and the comparison of rewards and advantages. Changes
nothing recorded: the new rewards live in the batch that is learned from, nowhere else.
"""

import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotpot.errors import UsageError
from hotpot.experience import RunReader, from_table, read_trajectories
from hotpot.learner import UpdateResult
from hotpot.models import PolicyTokenizer
from hotpot.topology.updates.batch import UpdateBatch
from hotpot.types import GroupRow, LearnedTokensRow, StepRow, Trajectory
from hotpot.versions import Version, package_version


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step as a reward function sees it.

    ``prompt`` is the text given to the model since its last output, ``output`` what it sampled, template's markers
    included in both. ``rewards`` are the recorded components by name.
    """

    turn: int
    prompt: str
    output: str
    tool_name: str | None
    tool_error: bool
    finish: str
    rewards: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrajectory:
    """What a reward function is given: the recorded content of one trajectory.

    ``task`` is the task's content, ``reward`` and ``success`` what the environment said then. ``record`` has all of it
    as the tables ``trajectories`` and ``steps`` do, token ids and log-probabilities too.
    """

    task: Any
    env: str
    success: bool
    end_reason: str
    reward: float
    steps: tuple[RecordedStep, ...]
    record: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A function of one recorded trajectory that returns its total reward, and the version that its code gives it."""

    call: Callable[[RecordedTrajectory], float]
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChange:
    """One trajectory: reward and advantage (mean over its loss tokens; None where it was not learned), then and now."""

    trajectory_id: str
    group_id: str
    reward: float
    new_reward: float
    advantage: float | None
    new_advantage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFindings:
    """What recomputed rewards come to in one update. ``kept`` and ``new_kept``: groups with signal, then and now."""

    reward_version: str
    changes: tuple[RewardChange, ...]
    kept: tuple[str, ...]
    new_kept: tuple[str, ...]

    @property
    def num_changed(self) -> int:
        """Trajectories whose reward is another."""
        return sum(change.reward != change.new_reward for change in self.changes)

    @property
    def num_turned(self) -> int:
        """Trajectories whose advantage has the other sign."""
        return sum((change.advantage or 0.0) * (change.new_advantage or 0.0) < 0 for change in self.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRewards:
    """New rewards by trajectory, with the version of what computed them; ``old`` are the recorded ones."""

    version: str
    groups: Mapping[str, str]
    old: Mapping[str, float]
    new: Mapping[str, float]


def load_reward(target: str) -> RewardFunction:
    """Return the function that ``target`` (``module:function``) names; modules of the working folder are found too.

    Raises :class:`UsageError` where there is none, and :class:`hotpot.errors.EnvironmentSpecError` where no file pins
    down what it is.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name.isidentifier():
        raise UsageError(f"--reward {target!r} is not of the form module:function; write it so")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"--reward {target}: {error}; name a function of a module that is installed or lies in this folder"
        ) from error
    version = package_version(
        kind="reward",
        name=f"{module_name}.{name}",
        declared="recomputed",
        packages=(module_name,),
        definers=(function,),
    )
    return RewardFunction(call=function, version=version)


def rewarded(
    batch: UpdateBatch, function: RewardFunction, reader: RunReader, tokenizer: PolicyTokenizer
) -> tuple[UpdateBatch, NewRewards]:
    """Return ``batch`` with every reward in it recomputed, peers' too, and what was and is.

    Raises :class:`UsageError` where the function fails or returns what is no finite number.
    """
    named = [peer.trajectory_id for peer in batch.peers()]
    peers = read_trajectories(reader, "trajectory_id IN (SELECT unnest(?))", [named]) if named else []
    everyone = {one.row.trajectory_id: one for one in (*batch.trajectories, *peers)}
    found = {name: _reward(function, recorded(one, tokenizer)) for name, one in everyone.items()}

    def again(one: Trajectory) -> Trajectory:
        return Trajectory(row=replace(one.row, reward=found[one.row.trajectory_id]), steps=one.steps)

    drawn = [
        replace(
            one,
            trajectory=again(one.trajectory),
            peers=tuple(replace(peer, reward=found[peer.trajectory_id]) for peer in one.peers),
        )
        for one in batch.drawn
    ]
    changed = replace(batch, collected=[again(one) for one in batch.collected], drawn=drawn)
    return changed, NewRewards(
        version=function.version.version,
        groups={name: one.row.group_id for name, one in everyone.items()},
        old={name: one.row.reward for name, one in everyone.items()},
        new=found,
    )


def recorded(trajectory: Trajectory, tokenizer: PolicyTokenizer) -> RecordedTrajectory:
    """Return ``trajectory`` as a reward function sees it."""

    def step(row: StepRow) -> RecordedStep:
        return RecordedStep(
            turn=row.turn,
            prompt=tokenizer.decode(row.prompt_tokens),
            output=tokenizer.decode(row.sampled_tokens),
            tool_name=row.tool_name,
            tool_error=row.tool_error,
            finish=row.finish,
            rewards=dict(zip(row.reward_names, row.reward_values, strict=True)),
        )

    row = trajectory.row
    return RecordedTrajectory(
        task=json.loads(row.task_content),
        env=row.env,
        success=row.success,
        end_reason=row.end_reason,
        reward=row.reward,
        steps=tuple(map(step, trajectory.steps)),
        record=trajectory,
    )


def compare_rewards(
    reader: RunReader, update: int, rewards: NewRewards, result: UpdateResult
) -> RewardFindings:
    """Return rewards and advantages of ``update`` as recorded and as they came out under ``rewards``."""
    learned: list[LearnedTokensRow] = from_table(
        "learned_tokens", reader.table("learned_tokens", where='"update" = ?', params=[update])
    )
    old = _advantages([(one.trajectory_id, one.advantages[one.loss_mask > 0]) for one in learned])
    new = _advantages([(one.trajectory_id, one.advantages[one.loss_mask > 0]) for one in result.learned])
    groups: list[GroupRow] = from_table(
        "groups", reader.table("groups", where='"update" = ?', params=[update])
    )
    collected = {group.group_id for group in groups}
    return RewardFindings(
        reward_version=rewards.version,
        changes=tuple(
            RewardChange(
                trajectory_id=name,
                group_id=rewards.groups[name],
                reward=rewards.old[name],
                new_reward=rewards.new[name],
                advantage=old.get(name),
                new_advantage=new.get(name),
            )
            for name in rewards.new
        ),
        kept=tuple(sorted(group.group_id for group in groups if group.kept)),
        new_kept=tuple(
            sorted(group.group_id for group in result.groups if group.kept and group.group_id in collected)
        ),
    )


def _advantages(parts: Sequence[tuple[str, Any]]) -> dict[str, float]:
    by_name: dict[str, list[Any]] = {}
    for name, values in parts:
        by_name.setdefault(name, []).append(values)
    return {name: float(np.concatenate(values).mean()) for name, values in by_name.items()}


def _reward(function: RewardFunction, trajectory: RecordedTrajectory) -> float:
    name = trajectory.record.row.trajectory_id
    value: Any = function.call(trajectory)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(
            f"the reward function {function.version} returned {value!r} for trajectory {name!r}; it must return the "
            "trajectory's total reward, a finite number"
        )
    return float(value)
