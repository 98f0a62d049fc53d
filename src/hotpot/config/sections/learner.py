"""Advantages, loss and optimiser."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hotpot.config.sections.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

MIN_SEGMENT_TOKENS = 64
"""Shortest piece a trajectory may be cut into."""


_ADAPTER_FIELDS = ("lora_alpha", "lora_targets")
"""Fields of :class:`LearnerSection` that only adapters read."""

_CRITIC_FIELDS = (
    "gae_lambda",
    "discount",
    "gae_level",
    "critic_extra_epochs",
    "value_coefficient",
    "value_clip",
    "critic_learning_rate",
)
"""Fields of :class:`LearnerSection` that only a critic reads."""

_TRACE_FIELDS = ("vtrace_rho_bar", "vtrace_c_bar")
"""Fields of :class:`LearnerSection` that only V-trace reads."""


class LearnerSection(Section):
    """Advantages, loss and optimiser."""

    advantages: Literal["group_mean", "group_normalized", "rloo", "reinforce_pp", "gae", "vtrace"] = (
        "group_mean"
    )
    """Reward minus the group's mean (Dr. GRPO, arXiv:2503.20783); that divided by the group's deviation (GRPO,
    arXiv:2402.03300); reward minus the mean of the others (RLOO, arXiv:2402.14740); without groups, normalised over the
    batch's loss tokens (REINFORCE++, arXiv:2501.03262); or with a critic, comparing with no group: generalised advantage
    estimation (arXiv:1506.02438), or V-trace (IMPALA, arXiv:1802.01561), which corrects advantages and returns of tokens
    that another policy sampled than the update starts from. See docs/estimators.md and docs/off-policy.md."""
    critic: Literal["none", "head", "separate"] = "none"
    """What says how much a state is worth: nothing, a value head on the policy's decoder, or a decoder of its own that
    starts as the starting model. Needed by ``gae`` and ``vtrace``, and by nothing else."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How far ``gae`` and ``vtrace`` look before they trust the critic: 1 to the end of the trajectory, 0 one decision."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a reward one decision later is worth, under ``gae`` and ``vtrace``."""
    gae_level: Literal["token", "step"] = "token"
    """What a decision is under ``gae``: each sampled token, or each step (one model call)."""
    vtrace_rho_bar: PositiveFloat = 1.0
    """Under ``vtrace`` an advantage counts by the ratio of the policy the update starts from to the one that sampled the
    token, at most this (rho-bar, arXiv:1802.01561, equation 1). It decides what the values come to: those of a policy
    between the two."""
    vtrace_c_bar: PositiveFloat = 1.0
    """How much of what came after a token its own return hears, by the same ratio, at most this (c-bar, the same); at most
    vtrace_rho_bar. It decides how fast the values come there."""
    critic_extra_epochs: NonNegativeInt = 0
    """Passes over a batch, after learner.epochs, in which only a separate critic learns."""
    value_coefficient: PositiveFloat = 0.02
    """Weight of the critic's loss beside the policy's. A value head's gradient goes into the policy's decoder and is the
    larger of the two: at 0.5 it drowned the policy's (docs/critic.md). A separate critic hardly feels it."""
    value_clip: NonNegativeFloat = 0.0
    """The critic's loss does not fall further where a value has moved by more than this in one update; 0 is off."""
    critic_learning_rate: PositiveFloat | None = None
    """Learning rate of the critic's own weights, falling as the policy's does; unset is learning_rate."""
    reward_normalization: Literal["none", "group", "batch", "running"] = "none"
    """Rewards are centred and divided by their deviation before they are compared: not, within their group, over the
    update's trajectories, or over those of the run so far."""
    advantage_normalization: Literal["none", "group", "batch", "running", "minibatch"] = "none"
    """The same for the advantages of the loss tokens, after they were estimated; or over those of each optimiser step."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Mean over all loss tokens of the optimiser step; mean over trajectories of the mean over their tokens; or mean over
    trajectories of the sum over their tokens divided by aggregation_tokens (Dr. GRPO, arXiv:2503.20783)."""
    aggregation_tokens: NonNegativeInt = 0
    """The constant length of aggregation = ``fixed_length``, for instance the most tokens an episode may sample."""
    ratio: Literal["token", "sequence"] = "token"
    """What is clipped: the ratio of each token, or the geometric mean of the ratios of its sequence (a segment, or a piece
    of one; GSPO, arXiv:2507.18071), which needs far smaller clip_low and clip_high (the paper: 3e-4 and 4e-4)."""
    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below at 1 - clip_low (PPO, arXiv:1707.06347)."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    clip_dual: NonNegativeFloat = 0.0
    """Where the advantage is negative the ratio counts at most this, above 1 (dual clip, arXiv:1912.09729); 0 is off."""
    old_logprobs: Literal["recorded", "recomputed"] = "recorded"
    """Old log-probabilities of the ratio: as the engine recorded them, or recomputed by the learner before the first step.
    ``recomputed`` is required where training samples from a filtered distribution."""
    agreement: Literal["every_token", "first_minibatch"] = "every_token"
    """Which tokens learner and sampler are compared on (``logprob_difference_max``): all of the batch, for which the other
    minibatches are computed once more at the weights the update starts from (a fifth of learning with 4 minibatches), or
    those of the first minibatch, whose own pass has these weights. Where old log-probabilities are recomputed, or tokens
    are decoupled (as all are under ``vtrace``), all are."""
    replayed_ratio_cap: PositiveFloat = 1.0
    """A replayed token counts by the ratio of the policy the update starts from to the policy that sampled it, at most
    this (truncated importance weight, arXiv:1802.01561); its clip is around the former (arXiv:2110.00641)."""
    decoupled: Literal["replayed", "stale", "all"] = "replayed"
    """Tokens whose clip is around the policy the update starts from and that count by the truncated ratio of that policy to
    the one that sampled them (decoupled PPO, arXiv:2110.00641): replayed ones, also those of an older policy version, or
    all (truncated importance sampling between sampler and learner, whatever they differ by). Under ``vtrace`` the clip of
    every token is around the starting policy, and its truncated ratio is in the advantage already."""
    importance_cap: PositiveFloat = 2.0
    """Largest such ratio for a token that is not replayed (arXiv:1802.01561)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the estimate of KL(new || reference) in the loss or the reward; 0 is off."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimate from one token (Schulman 2020): log ratio, half its square, or ratio - 1 - log ratio."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it is: a term of the loss, or taken off the reward before advantages are estimated."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of an entropy bonus in the loss, per nat; 0 is off."""
    reference_path: Path | None = None
    """Model folder of the reference; by default the starting model. Read only where kl_coefficient > 0."""
    epochs: PositiveInt = 1
    """Passes over a batch."""
    minibatches: PositiveInt = 4
    """Optimiser steps in a pass; trajectories are dealt to them evenly by token count."""
    micro_batch_tokens: PositiveInt = 16384
    """Largest padded size of one forward and backward pass, in tokens."""
    segment_tokens: NonNegativeInt = 0
    """Trajectories longer than this are cut into pieces of at most this many tokens (at least 64), each learned without
    the context before it; 0 is off. Needs old_logprobs = ``recomputed`` where it cuts anything."""
    segment_overlap: NonNegativeInt = 0
    """Tokens that a piece repeats of the one before it, as context only; at most half of segment_tokens."""
    advantage_merge: Literal["mean", "nearest_centre", "last"] = "nearest_centre"
    """Which advantage estimate a token is learned with that overlapping pieces hold: the mean of all, that of the piece
    whose middle is nearest, or the latest piece's. A group baseline gives them all the same."""
    packing: Literal["padded", "packed"] = "padded"
    """Layout of a pass: each sequence in a padded row of its own, or several end to end in a row."""
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    """What the matrix products of the learner's passes are computed in; weights, moments, logits and losses are float32 in
    any case. ``auto`` is bfloat16 where the device has instructions for it. Needs old_logprobs = ``recomputed`` or
    decoupled = ``all`` unless it is float32: the sampler's log-probabilities are more exact than the learner's then."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the gradient and compute the rest again: less memory, more work, the same bits."""
    learning_rate: NonNegativeFloat = 1.5e-4
    """Learning rate of AdamW; 0 runs everything and changes nothing."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How the rate falls over the run's updates: in a straight line, or along half a cosine (arXiv:1608.03983)."""
    warmup_updates: NonNegativeInt = 0
    """Updates over which the rate rises in a straight line before it falls; fewer than topology.updates."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The rate falls to this share of itself over the run's updates; 1 keeps it."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first moment decay."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """AdamW's second moment decay."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm is clipped to this."""
    lora_rank: NonNegativeInt = 0
    """Rank of a low-rank adapter on each of lora_targets (LoRA, arXiv:2106.09685), which alone learn then; 0 is off: all
    weights learn. Needs the extra ``lora``. There is no dropout in them: a ratio would compare two random networks."""
    lora_alpha: PositiveFloat = 16.0
    """What an adapter adds is multiplied by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear layers that get an adapter; the output head gets none."""
    max_skipped_in_a_row: PositiveInt = 5
    """Optimiser steps skipped, one after the other, before the run stops."""
    max_grad_norm_ratio: NonNegativeFloat = 10.0
    """A gradient norm above this many times the median of the last 64 counts as exploding and is recorded with its
    evidence; 0 is off."""
    skip_exploding: bool = False
    """Skip an optimiser step whose gradient is exploding, as one that is not finite."""
    evidence_files: NonNegativeInt = 64
    """Most files of evidence about such steps that a run keeps; what comes after is recorded without one."""
    evidence_bytes: NonNegativeInt = 64 * 1024 * 1024
    """Most bytes that these files may take together."""

    @model_validator(mode="after")
    def _ratio_is_one(self) -> Self:
        if 0 < self.max_grad_norm_ratio <= 1:
            raise ValueError(
                f"learner.max_grad_norm_ratio = {self.max_grad_norm_ratio:g} would call half of all steps exploding; use "
                "more than 1, or 0 (off)"
            )
        if self.skip_exploding and not self.max_grad_norm_ratio:
            raise ValueError(
                "learner.skip_exploding has nothing to skip where learner.max_grad_norm_ratio = 0; set that, or leave it"
            )
        return self

    @property
    def has_values(self) -> bool:
        """Whether advantages are made of a critic's values."""
        return self.advantages in {"gae", "vtrace"}

    @property
    def groupless(self) -> bool:
        """Whether a trajectory is compared with none of its group."""
        return self.advantages == "reinforce_pp" or self.has_values

    @model_validator(mode="after")
    def _precision_fits(self) -> Self:
        around_start = self.decoupled == "all" or self.advantages == "vtrace"
        if self.precision != "float32" and self.old_logprobs == "recorded" and not around_start:
            raise ValueError(
                f"learner.precision = {self.precision!r}: the recorded log-probabilities are more exact than the learner's, "
                "and their ratio would be rounding; set learner.old_logprobs = 'recomputed' or learner.decoupled = 'all'"
            )
        return self

    @model_validator(mode="after")
    def _loss_fits(self) -> Self:
        if 0 < self.clip_dual <= 1:
            raise ValueError(
                f"learner.clip_dual = {self.clip_dual} would clip tokens whose ratio has not grown; use 0 (off) or a value "
                "above 1, such as 3"
            )
        if (self.aggregation == "fixed_length") != (self.aggregation_tokens > 0):
            raise ValueError(
                f"learner.aggregation = {self.aggregation!r} with learner.aggregation_tokens = {self.aggregation_tokens}: "
                "the constant is set (for instance to the most tokens an episode may sample) exactly where aggregation is "
                "'fixed_length'"
            )
        if self.decoupled == "replayed" and self.importance_cap != 2.0:
            raise ValueError(
                f"learner.importance_cap = {self.importance_cap} has no token to count for: learner.decoupled = 'replayed' "
                "uses learner.replayed_ratio_cap; set that, or decoupled = 'stale' or 'all'"
            )
        if self.kl_in == "reward" and self.kl_coefficient == 0:
            raise ValueError(
                "learner.kl_in = 'reward' with learner.kl_coefficient = 0 takes nothing off; set the coefficient, or leave "
                "kl_in out"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coefficient > 0:
            raise ValueError(
                "learner.kl_estimator = 'k1' in the loss has a gradient that is 0 on average and holds nothing back; use "
                "'k2' or 'k3', or learner.kl_in = 'reward'"
            )
        return self

    @model_validator(mode="after")
    def _scales_fit(self) -> Self:
        if self.advantages == "group_normalized" and self.reward_normalization != "none":
            raise ValueError(
                f"learner.reward_normalization = {self.reward_normalization!r} is undone by learner.advantages = "
                "'group_normalized', which divides by each group's deviation; leave the former out, or use 'group_mean'"
            )
        if self.has_values and self.reward_normalization != "none":
            raise ValueError(
                f"learner.reward_normalization = {self.reward_normalization!r} puts whole trajectories on a scale, and "
                f"learner.advantages = {self.advantages!r} learns from what each token earned; leave it out, or use "
                "learner.advantage_normalization = 'batch'"
            )
        twice = {"group_normalized": ("group",), "reinforce_pp": ("group", "batch", "running", "minibatch")}
        if self.advantage_normalization in twice.get(self.advantages, ()):
            raise ValueError(
                f"learner.advantages = {self.advantages!r} is normalised by itself; leave "
                f"learner.advantage_normalization = {self.advantage_normalization!r} out"
            )
        if self.advantages in {"group_mean", "rloo"} and self.advantage_normalization == "group":
            raise ValueError(
                f"learner.advantage_normalization = 'group' after learner.advantages = {self.advantages!r}: say "
                "advantages = 'group_normalized' instead, which divides by the deviation of the group's rewards"
            )
        return self

    @model_validator(mode="after")
    def _critic_has_a_use(self) -> Self:
        if self.critic_extra_epochs and self.critic != "separate":
            raise ValueError(
                f"learner.critic_extra_epochs = {self.critic_extra_epochs} with learner.critic = {self.critic!r}: only a "
                "critic with a decoder of its own can learn on while the policy stays; set learner.critic = 'separate', or 0"
            )
        if (self.critic != "none") != self.has_values:
            raise ValueError(
                f"learner.critic = {self.critic!r} with learner.advantages = {self.advantages!r}: values are what 'gae' and "
                "'vtrace' are made of, and nothing else reads them; set learner.advantages = 'gae' and learner.critic = "
                "'head' or 'separate', or neither"
            )
        if self.critic != "none":
            return self
        for name in _CRITIC_FIELDS:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ValueError(
                    f"learner.{name} = {value!r} says how a critic learns, and learner.critic = 'none'; leave it out, or "
                    "set learner.advantages = 'gae' and learner.critic = 'head' or 'separate'"
                )
        return self

    @model_validator(mode="after")
    def _trace_fits(self) -> Self:
        fields = type(self).model_fields
        if self.advantages != "vtrace":
            for name in _TRACE_FIELDS:
                if getattr(self, name) != fields[name].default:
                    raise ValueError(
                        f"learner.{name} = {getattr(self, name):g} is a bound of V-trace, and learner.advantages = "
                        f"{self.advantages!r}; leave it out, or set learner.advantages = 'vtrace'"
                    )
            return self
        if self.vtrace_c_bar > self.vtrace_rho_bar:
            raise ValueError(
                f"learner.vtrace_c_bar = {self.vtrace_c_bar:g} is above learner.vtrace_rho_bar = {self.vtrace_rho_bar:g}; "
                "V-trace needs the latter to be as large at least: raise it, or lower the former"
            )
        if self.gae_level != "token":
            raise ValueError(
                f"learner.gae_level = {self.gae_level!r} with learner.advantages = 'vtrace': the ratio of a whole step is a "
                "product over its tokens, which is near 0 or cut off; set gae_level = 'token', or advantages = 'gae'"
            )
        for name in ("decoupled", "replayed_ratio_cap", "importance_cap"):
            if getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"learner.{name} = {getattr(self, name)!r} with learner.advantages = 'vtrace' would count a token by its "
                    "ratio twice: V-trace has it in the advantage; leave it out and set learner.vtrace_rho_bar"
                )
        return self

    @model_validator(mode="after")
    def _adapters_are_on(self) -> Self:
        if self.lora_rank and not self.lora_targets:
            raise ValueError(
                f"learner.lora_rank = {self.lora_rank} with learner.lora_targets = []: nothing would learn; name linear "
                "layers, or set lora_rank = 0"
            )
        for name in () if self.lora_rank else _ADAPTER_FIELDS:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ValueError(
                    f"learner.{name} = {value!r} says how adapters learn, and learner.lora_rank = 0; leave it out, or set "
                    "learner.lora_rank"
                )
        return self

    @model_validator(mode="after")
    def _segments_fit(self) -> Self:
        if 0 < self.segment_tokens < MIN_SEGMENT_TOKENS:
            raise ValueError(
                f"learner.segment_tokens = {self.segment_tokens} leaves a piece no room for context; use 0 (off) or at "
                f"least {MIN_SEGMENT_TOKENS}"
            )
        if self.segment_overlap and not self.segment_tokens:
            raise ValueError(
                f"learner.segment_overlap = {self.segment_overlap} without learner.segment_tokens has nothing to overlap; "
                "set both, or neither"
            )
        if 2 * self.segment_overlap > self.segment_tokens:
            raise ValueError(
                f"learner.segment_overlap = {self.segment_overlap} is more than half of learner.segment_tokens = "
                f"{self.segment_tokens}: most tokens would be computed three times; lower it"
            )
        return self
