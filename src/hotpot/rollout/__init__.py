"""Running episodes: conversations as tokens, one episode as a state machine, many of them over one engine.

``template`` a chat template as a pure function of a conversation's shape · ``layout`` rendered text as tokens and
stages · ``arguments``, ``syntax`` how a model writes calls · ``dialect`` messages to tokens and back, with ``conversation``
one as it grows · ``overflow`` what becomes of a full context, ``windows`` that carried out, with ``bridge`` what stands for
what was left out · ``boundary`` what
crosses it to an environment's code · ``recorder`` rows of steps · ``context`` the tokens on record · ``loop`` one
episode · ``tasks`` which tasks are run, with ``mix`` of which environment, ``pools`` of which difficulty, ``draws`` by
which chance · ``seeds`` with which chances · ``attempts`` tries, for the ledger ·
``engine_report`` whether the engine did as it was asked · ``collector`` many episodes over an engine
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotpot.rollout.attempts import STOPPED, AttemptLog, RolloutCounts
    from hotpot.rollout.clock import Clock
    from hotpot.rollout.collector import Rollout, Scene
    from hotpot.rollout.conversation import Conversation
    from hotpot.rollout.dialect import Dialect
    from hotpot.rollout.dialect_check import check_dialect
    from hotpot.rollout.loop import Episode, EpisodeRules
    from hotpot.rollout.mix import ONLY, Mix, MixedEnvironment
    from hotpot.rollout.past import NOTHING, Past, same_experience
    from hotpot.rollout.pools import GroupOutcome, Pool, Pools, Verdict, verdict_of
    from hotpot.rollout.prompt import Output, Prompt, Rewrite
    from hotpot.rollout.recorder import Provenance
    from hotpot.rollout.seeds import environment_seed, sampling_seed
    from hotpot.rollout.tasks import Choice, EpisodePlan, TaskSampler

__all__ = [
    "NOTHING",
    "ONLY",
    "STOPPED",
    "AttemptLog",
    "Choice",
    "Clock",
    "Conversation",
    "Dialect",
    "Episode",
    "EpisodePlan",
    "EpisodeRules",
    "GroupOutcome",
    "Mix",
    "MixedEnvironment",
    "Output",
    "Past",
    "Pool",
    "Pools",
    "Prompt",
    "Provenance",
    "Rewrite",
    "Rollout",
    "RolloutCounts",
    "Scene",
    "TaskSampler",
    "Verdict",
    "check_dialect",
    "environment_seed",
    "same_experience",
    "sampling_seed",
    "verdict_of",
]

_HOMES = {
    "attempts": (
        "STOPPED",
        "AttemptLog",
        "RolloutCounts",
    ),
    "clock": ("Clock",),
    "collector": (
        "Rollout",
        "Scene",
    ),
    "conversation": ("Conversation",),
    "dialect": ("Dialect",),
    "dialect_check": ("check_dialect",),
    "loop": (
        "Episode",
        "EpisodeRules",
    ),
    "mix": (
        "ONLY",
        "Mix",
        "MixedEnvironment",
    ),
    "past": (
        "NOTHING",
        "Past",
        "same_experience",
    ),
    "pools": (
        "GroupOutcome",
        "Pool",
        "Pools",
        "Verdict",
        "verdict_of",
    ),
    "prompt": (
        "Output",
        "Prompt",
        "Rewrite",
    ),
    "recorder": ("Provenance",),
    "seeds": (
        "environment_seed",
        "sampling_seed",
    ),
    "tasks": (
        "Choice",
        "EpisodePlan",
        "TaskSampler",
    ),
}
"""Which module each name comes from."""


def __getattr__(name: str) -> Any:
    """Load a part only when it is asked for: an actor's process needs none of tokens, engines and torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
