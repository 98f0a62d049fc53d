"""From training sequences to new weights: advantages, losses, batches, optimiser steps."""

from hotpot.learner.batches.budget import Halving
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
from hotpot.learner.update.terms import recorded_halving

__all__ = [
    "Advantages",
    "Agreement",
    "CulpritSequence",
    "CulpritToken",
    "Finding",
    "GroupStatistics",
    "Halving",
    "LearnedSequence",
    "Learner",
    "Member",
    "NonFiniteError",
    "OptimizerStep",
    "UpdateResult",
    "group_advantages",
    "recorded_halving",
]
