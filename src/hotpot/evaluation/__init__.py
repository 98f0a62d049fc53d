"""Measuring policies on tasks that never touch an update.

``intervals`` confidence intervals · ``evaluator`` hold-out success of the policy being served, and the gap to training
"""

from hotpot.evaluation.evaluator import Evaluator, MeasuredVersions, generalisation_gap, verdicts
from hotpot.evaluation.intervals import Interval, independent_difference, paired_difference, wilson

__all__ = [
    "Evaluator",
    "Interval",
    "MeasuredVersions",
    "generalisation_gap",
    "independent_difference",
    "paired_difference",
    "verdicts",
    "wilson",
]
