"""Recorded updates done over (``hotpot replay``): proof that the record explains the weights, and what-if.

``redo`` the doing · ``way`` from which checkpoint, by which updates · ``terms`` settings in force, or changed ·
``learners`` the state to learn from · ``findings`` what differs · ``rewards`` other rewards over the same trajectories
"""

from hotpot.topology.redo.findings import Figure, Findings, compare_rows
from hotpot.topology.redo.redo import Changes, Redone, redo
from hotpot.topology.redo.rewards import (
    RecordedStep,
    RecordedTrajectory,
    RewardFindings,
    RewardFunction,
    load_reward,
)
from hotpot.topology.redo.way import Way

__all__ = [
    "Changes",
    "Figure",
    "Findings",
    "RecordedStep",
    "RecordedTrajectory",
    "Redone",
    "RewardFindings",
    "RewardFunction",
    "Way",
    "compare_rows",
    "load_reward",
    "redo",
]
