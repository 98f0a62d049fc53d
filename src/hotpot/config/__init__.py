"""Recipes: every setting, its one default and its meaning. Imports no torch.

``recipe`` the models and their defaults · ``load`` TOML and overrides into a Recipe · ``plan`` the sizes derived from it
"""

from hotpot.config.recipe import Recipe
from hotpot.config.sections import (
    CheckpointSection,
    DebugSection,
    EngineSection,
    EnvSection,
    EvaluationSection,
    GateSection,
    LearnerSection,
    ModelSection,
    OpenAIEngineSection,
    PromptSection,
    ReplaySection,
    RolloutSection,
    RunSection,
    S3Section,
    SamplingSection,
    SamplingSettings,
    StoreSection,
    TopologySection,
    VllmEngineSection,
    WarmstartSection,
    has_user_info,
)

__all__ = [
    "CheckpointSection",
    "DebugSection",
    "EngineSection",
    "EnvSection",
    "EvaluationSection",
    "GateSection",
    "LearnerSection",
    "ModelSection",
    "OpenAIEngineSection",
    "PromptSection",
    "Recipe",
    "ReplaySection",
    "RolloutSection",
    "RunSection",
    "S3Section",
    "SamplingSection",
    "SamplingSettings",
    "StoreSection",
    "TopologySection",
    "VllmEngineSection",
    "WarmstartSection",
    "has_user_info",
]
