"""The sections of a recipe: every setting with its one default and its meaning under it."""

from hotpot.config.sections.base import Section
from hotpot.config.sections.engines import (
    AnyEngineSection,
    OpenAIEngineSection,
    RemoteSection,
    VllmEngineSection,
)
from hotpot.config.sections.learner import MIN_SEGMENT_TOKENS, LearnerSection
from hotpot.config.sections.models import ModelSection, WarmstartSection
from hotpot.config.sections.rollout import (
    EngineSection,
    EvaluationSection,
    RolloutSection,
    SamplingSection,
    SamplingSettings,
)
from hotpot.config.sections.run import CheckpointSection, DebugSection, RunSection
from hotpot.config.sections.store import GateSection, ReplaySection, S3Section, StoreSection, has_user_info
from hotpot.config.sections.tasks import EnvSection, MixEntry, PoolWeights, PromptSection, TasksSection
from hotpot.config.sections.topology import ActorsSection, QueueSection, SupervisionSection, TopologySection

__all__ = [
    "MIN_SEGMENT_TOKENS",
    "ActorsSection",
    "AnyEngineSection",
    "CheckpointSection",
    "DebugSection",
    "EngineSection",
    "EnvSection",
    "EvaluationSection",
    "GateSection",
    "LearnerSection",
    "MixEntry",
    "ModelSection",
    "OpenAIEngineSection",
    "PoolWeights",
    "PromptSection",
    "QueueSection",
    "RemoteSection",
    "ReplaySection",
    "RolloutSection",
    "RunSection",
    "S3Section",
    "SamplingSection",
    "SamplingSettings",
    "Section",
    "StoreSection",
    "SupervisionSection",
    "TasksSection",
    "TopologySection",
    "VllmEngineSection",
    "WarmstartSection",
    "has_user_info",
]
