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
