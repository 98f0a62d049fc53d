"""Topologies: who waits for whom; and the wiring, start and end of a run.

``sync`` the loop · ``halves`` one half of it, for debugging · ``session`` the moves every topology shares · ``wiring``
from a recipe to a session · ``runs`` start, resume, stop, sum up · ``warmstart`` a first policy from a demonstrator
"""

from hotpot.topology.runs import evaluate_run, train
from hotpot.topology.warmstart import warmstart

__all__ = ["evaluate_run", "train", "warmstart"]
