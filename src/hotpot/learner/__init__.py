"""From training sequences to new weights: advantages, losses, batches, optimiser steps."""

from hotpot.learner.estimators.advantages import Advantages, GroupStatistics, Member, group_advantages
from hotpot.learner.faults.findings import CulpritSequence, CulpritToken, Finding
from hotpot.learner.learner import Learner
from hotpot.learner.update.results import (
    Agreement,
    LearnedSequence,
    NonFiniteError,
    OptimizerStep,
    UpdateResult,
)

__all__ = [
    "Advantages",
    "Agreement",
    "CulpritSequence",
    "CulpritToken",
    "Finding",
    "GroupStatistics",
    "LearnedSequence",
    "Learner",
    "Member",
    "NonFiniteError",
    "OptimizerStep",
    "UpdateResult",
    "group_advantages",
]
