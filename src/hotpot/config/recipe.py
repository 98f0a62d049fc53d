"""The recipe: every setting of a run, each with its one default and its meaning under it.

Unknown keys are errors. Sections with variants are tagged by ``kind``. Nothing here reads a file or imports torch.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hotpot.types import SamplingParams

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


MIN_SEGMENT_TOKENS = 64
"""Shortest piece a trajectory may be cut into."""


class Section(BaseModel):
    """Base of every section: closed, immutable, documented by the strings under its fields."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        hide_input_in_errors=True,  # it may hold a secret, and every rule here names the value itself
    )


class RunSection(Section):
    """The run as a whole."""

    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")
    """Id of the run and name of its folder; by default the recipe's name and the time."""
    folder: Path = Path("runs")
    """Folder that holds the run folders."""
    seed: NonNegativeInt = 0
    """Seed of everything random in the run: tasks, sampling, minibatch order."""
    deterministic: bool = False
    """Same seed, same bits on the same kind of machine: one thread, no decision that hangs on the clock."""
    threads: NonNegativeInt = 0
    """Threads for tensor computation; 0 takes the count measured best for the model (see docs/performance.md)."""
    trace: bool = True
    """Write trace.json, which Perfetto opens."""
    self_test: bool = True
    """Test the set-up on the first batch of every start and resume, before anything is learned from it."""
    self_test_tolerance: PositiveFloat = 1e-3
    """Largest |learner - sampler| log-probability in nats that the self-test takes for rounding."""


class EnvSection(Section):
    """What the agent acts in."""

    kind: str = "order_desk"
    """Name of the environment, as registered under the entry point ``hotpot.environments``."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of that environment; its own model checks them."""


class MixEntry(Section):
    """One environment of a mix (``[[tasks.mix]]``)."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """Name of the environment in this recipe; it may be the same kind as another, with other parameters."""
    kind: str
    """Name of the environment, as registered under the entry point ``hotpot.environments``."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of that environment; its own model checks them."""
    weight: PositiveFloat = 1.0
    """Part of the tasks that come from it, relative to the others'."""


class PoolWeights(Section):
    """How many times as often a task is drawn that stands in a pool, by pool."""

    unseen: NonNegativeFloat = 1.0
    """Tasks nothing was heard of yet."""
    unsolved: NonNegativeFloat = 0.5
    """Tasks all of whose episodes failed."""
    learnable: NonNegativeFloat = 2.0
    """Tasks some of whose episodes succeeded, or whose rewards differ."""
    solved: NonNegativeFloat = 0.25
    """Tasks all of whose episodes succeeded."""


class TasksSection(Section):
    """Which tasks are trained on."""

    mix: tuple[MixEntry, ...] = ()
    """Environments to train in and to evaluate on, instead of the one of section env: a list of tables with name, kind,
    params and weight."""
    num_tasks: NonNegativeInt = 0
    """Training tasks of each environment, drawn again and again; 0: every task issued is a new one."""
    pools: bool = False
    """Draw tasks by what is known of their difficulty; needs num_tasks."""
    pool_weights: PoolWeights = PoolWeights()
    """How much more often tasks of a pool are drawn."""
    pool_decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """What older evidence of a task keeps of its weight with each group of it that ends; 0: only the last one counts."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [entry.name for entry in self.mix]
        if len(set(names)) < len(names):
            raise ValueError(
                f"tasks.mix has two environments of one name ({', '.join(names)}); name them apart"
            )
        if self.pools and not self.num_tasks:
            raise ValueError(
                "tasks.pools = true has nothing to sort where every task is new; set tasks.num_tasks, or leave pools off"
            )
        weights = self.pool_weights
        if not weights.unseen and not weights.learnable:
            raise ValueError(
                "tasks.pool_weights gives neither unseen nor learnable tasks any weight, so nothing new is ever learned; "
                "raise one of them"
            )
        return self


class PromptSection(Section):
    """What the model is told before the task."""

    system: str | None = None
    """System prompt; by default the environment's own."""


class ModelSection(Section):
    """The policy."""

    path: Path | None = None
    """Folder in the format of transformers (config.json, safetensors, tokenizer, chat template)."""


class WarmstartSection(Section):
    """Supervised warm start of a small policy on the environment's demonstrator (``hotpot model warmstart``)."""

    hidden_size: PositiveInt = 128
    """Width of the model; a multiple of num_heads."""
    num_layers: PositiveInt = 2
    """Decoder layers."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    num_kv_heads: PositiveInt = 1
    """Key/value heads; divides num_heads. One makes generation faster: attention reads a quarter of the cache."""
    intermediate_size: PositiveInt = 384
    """Width of the feed-forward layer."""
    rope_theta: PositiveFloat = 1000.0
    """Base of the rotary embedding; 1,000 learns to copy over short contexts several times faster than 10,000."""
    initializer_range: PositiveFloat = 0.06
    """Standard deviation of the initial weights."""
    max_context_tokens: PositiveInt = 512
    """Longest context the model is built for."""
    steps: PositiveInt = 900
    """Optimiser steps."""
    batch_size: PositiveInt = 8
    """Demonstrations in an optimiser step."""
    learning_rate: PositiveFloat = 1.5e-3
    """Peak learning rate: up over a tenth of the steps, level, down over the last quarter to a tenth."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm is clipped to this."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"warmstart.hidden_size = {self.hidden_size} is not a multiple of 2 x warmstart.num_heads = "
                f"{2 * self.num_heads}: the rotary embedding turns pairs in each head; change either"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"warmstart.num_kv_heads = {self.num_kv_heads} does not divide warmstart.num_heads = {self.num_heads}; "
                "change either"
            )
        return self


class RolloutSection(Section):
    """How episodes are collected."""

    tasks_per_batch: PositiveInt = 16
    """Tasks issued for one update."""
    samples_per_task: PositiveInt = 8
    """Episodes of each issued task; they form one group."""
    max_steps: PositiveInt = 8
    """Model calls in an episode, then it ends with max_steps."""
    max_step_tokens: PositiveInt = 48
    """Tokens sampled in one step, then the episode ends with max_step_tokens."""
    max_context_tokens: PositiveInt = 512
    """Tokens of an episode's whole context, then it ends with max_context."""
    max_seconds: PositiveFloat = 60.0
    """Time of an episode (its environment's, and the engine's while its request is out), then it ends with max_seconds
    and is not learned from. Not applied in deterministic mode."""
    max_attempts: PositiveInt = 3
    """Tries at an episode whose environment fails, each in a fresh environment; then it is dropped and counted."""
    refill: Literal["none", "until_signal"] = "none"
    """``until_signal``: further tasks are run for groups whose rewards are all (almost) the same, within the update,
    until tasks_per_batch groups have signal (dynamic sampling as in DAPO, arXiv:2503.14476). The others are stored and
    counted as always."""
    max_refill_rounds: PositiveInt = 3
    """Rounds of refilling in one update; then it learns from what it has."""


class SamplingSettings(Section):
    """One frozen set of sampling parameters."""

    temperature: NonNegativeFloat = 1.0
    """Temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass; 1 is off."""
    top_k: NonNegativeInt = 0
    """Top-k; 0 is off."""
    repetition_penalty: PositiveFloat = 1.0
    """Repetition penalty; 1 is off."""

    def params(self) -> SamplingParams:
        """Return the frozen record the engine is given."""
        return SamplingParams(**self.model_dump())


class SamplingSection(Section):
    """Sampling parameters, frozen per purpose for the whole run."""

    training: SamplingSettings = SamplingSettings()
    """For the episodes that are trained on."""
    evaluation: SamplingSettings = SamplingSettings()
    """For hold-out evaluation (greedy evaluation is separate and always greedy)."""


class EngineSection(Section):
    """The inference engine."""

    kind: Literal["embedded"] = "embedded"
    """Which engine; ``embedded`` runs in the process."""
    max_concurrency: PositiveInt = 128
    """Trajectories whose key/value cache is held at once."""
    admit_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Waiting requests are prefilled together once they are this share of all requests in the engine, or nothing runs."""
    prefill_tokens: PositiveInt = 2048
    """Largest padded size of one prefill pass, in tokens; longer prompts are computed in pieces of this size."""


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


class LearnerSection(Section):
    """Advantages, loss and optimiser."""

    advantages: Literal["group_mean", "group_normalized", "rloo", "reinforce_pp", "gae"] = "group_mean"
    """Reward minus the group's mean (Dr. GRPO, arXiv:2503.20783); that divided by the group's deviation (GRPO,
    arXiv:2402.03300); reward minus the mean of the others (RLOO, arXiv:2402.14740); without groups, normalised over the
    batch's loss tokens (REINFORCE++, arXiv:2501.03262); or generalised advantage estimation with a critic
    (arXiv:1506.02438), which compares with no group. See docs/estimators.md."""
    critic: Literal["none", "head", "separate"] = "none"
    """What says how much a state is worth: nothing, a value head on the policy's decoder, or a decoder of its own that
    starts as the starting model. Needed by ``gae``, and by nothing else."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How far ``gae`` looks before it trusts the critic: 1 to the end of the trajectory, 0 one decision."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a reward one decision later is worth, under ``gae``."""
    gae_level: Literal["token", "step"] = "token"
    """What a decision is under ``gae``: each sampled token, or each step (one model call)."""
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
    replayed_ratio_cap: PositiveFloat = 1.0
    """A replayed token counts by the ratio of the policy the update starts from to the policy that sampled it, at most
    this (truncated importance weight, arXiv:1802.01561); its clip is around the former (arXiv:2110.00641)."""
    decoupled: Literal["replayed", "stale", "all"] = "replayed"
    """Tokens whose clip is around the policy the update starts from and that count by the truncated ratio of that policy to
    the one that sampled them (decoupled PPO, arXiv:2110.00641): replayed ones, also those of an older policy version, or
    all (truncated importance sampling between sampler and learner, whatever they differ by)."""
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
    learning_rate: NonNegativeFloat = 1.5e-4
    """Learning rate of AdamW; 0 runs everything and changes nothing."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The rate falls linearly to this share of itself over the run's updates; 1 keeps it."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first moment decay."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """AdamW's second moment decay."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm is clipped to this."""
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
        if self.advantages == "gae" and self.reward_normalization != "none":
            raise ValueError(
                f"learner.reward_normalization = {self.reward_normalization!r} puts whole trajectories on a scale, and "
                "learner.advantages = 'gae' learns from what each token earned; leave it out, or use "
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
        if (self.critic != "none") != (self.advantages == "gae"):
            raise ValueError(
                f"learner.critic = {self.critic!r} with learner.advantages = {self.advantages!r}: values are what 'gae' is "
                "made of, and nothing else reads them; set learner.advantages = 'gae' and learner.critic = 'head' or "
                "'separate', or neither"
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


class TopologySection(Section):
    """Who waits for whom."""

    kind: Literal["sync"] = "sync"
    """``sync``: collect, learn, publish, in turn."""
    updates: PositiveInt = 60
    """Updates in the run."""
    max_seconds: PositiveFloat | None = None
    """Wall time after which no further update begins; the final evaluation still runs."""


class EvaluationSection(Section):
    """Measuring the policy on tasks that never touch an update."""

    every_updates: NonNegativeInt = 20
    """Updates between scheduled evaluations; 0 is off."""
    num_tasks: PositiveInt = 128
    """Hold-out tasks in a scheduled evaluation."""
    num_tasks_final: PositiveInt = 512
    """Hold-out tasks in the evaluations before and after."""
    greedy: bool = True
    """Evaluate greedily too, on the same tasks."""


def has_user_info(address: str) -> bool:
    """Whether an address such as ``https://name:password@host/path`` holds a user or a password."""
    scheme, mark, rest = address.partition("://")
    return bool(mark) and "/" not in scheme and "@" in re.split(r"[/?#]", rest, maxsplit=1)[0]


class S3Section(Section):
    """S3-compatible storage of a lake at ``s3://bucket/prefix``. Credentials come from the environment only:
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, where there is one, AWS_SESSION_TOKEN."""

    endpoint: str = ""
    """Address of the server, as ``http://127.0.0.1:8333``; empty for Amazon's own."""
    region: str = "us-east-1"
    """Region the bucket lies in; servers of your own mostly take any."""
    allow_http: bool = False
    """Allow an endpoint without TLS."""
    connect_timeout_s: PositiveFloat = 3.0
    """Longest wait for a connection."""
    request_timeout_s: PositiveFloat = 10.0
    """Longest wait for the answer to one request."""
    retries: NonNegativeInt = 2
    """Further tries of a request before the operation counts as failed; the archive then tries it again as a whole."""

    @property
    def deadline_s(self) -> float:
        """Seconds after which no request is tried again."""
        return self.request_timeout_s * (self.retries + 1)

    @model_validator(mode="after")
    def _endpoint_is_allowed(self) -> Self:
        if "@" in self.endpoint:
            raise ValueError(
                "store.s3.endpoint must hold no user or password, as run folder and lake keep it; leave out what stands "
                "before its @ and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
            )
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"store.s3.endpoint = {self.endpoint!r} must begin with http:// or https://")
        if self.endpoint.startswith("http://") != self.allow_http:
            raise ValueError(
                f"store.s3.endpoint = {self.endpoint!r} and store.s3.allow_http = {self.allow_http} contradict each "
                "other; allow_http is true exactly for an endpoint that begins with http://"
            )
        return self


class StoreSection(Section):
    """Log, ledger and lake."""

    lake: str | None = None
    """Where the lake lies: a folder, or s3://bucket/prefix. Several runs may share one. By default the run folder's
    own ``lake``."""
    s3: S3Section = S3Section()
    """How to reach a lake on S3."""
    archive_every_batches: PositiveInt = 16
    """Batches in the log after which the background writer commits them to the lake."""
    archive_every_s: PositiveFloat = 10.0
    """Seconds after which it commits what is there."""
    archive_every_bytes: PositiveInt = 32 * 1024 * 1024
    """Bytes in the log after which it commits."""
    acknowledge: Literal["log", "lake"] = "log"
    """When a trajectory counts as stored: in the fsynced log (survives the process), or committed to the lake."""
    flush_timeout_s: PositiveFloat = 120.0
    """Longest wait for the lake to take what is in the log, where something waits for that: at the end of the run, and
    with acknowledge = "lake"."""
    max_backlog: PositiveInt = 64
    """Log segments that may wait for a lake that takes none; then whoever appends waits too. Each holds about
    archive_every_bytes while the lake fails."""
    backpressure_s: NonNegativeFloat = 300.0
    """Longest such wait before the run ends with an error; everything acknowledged stays in the log."""
    max_bytes: NonNegativeInt = 0
    """Most bytes the run's log and local lake may take together before the run stops in order; 0 sets no bound."""
    min_free_bytes: NonNegativeInt = 256 * 1024 * 1024
    """Bytes that stay free on the disks of log and local lake: the run stops in order before it takes them."""
    redact_patterns: tuple[str, ...] = ()
    """Further regular expressions: matches in an environment's text and in reasons of failures are redacted before the
    model and the log see them."""

    @model_validator(mode="after")
    def _lake_holds_no_secret(self) -> Self:
        if self.lake is not None and has_user_info(self.lake):
            raise ValueError(
                "store.lake must hold no user or password, as run folder and lake keep it; leave out what stands before "
                "its @ and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
            )
        return self


class GateSection(Section):
    """The gate's circuit breaker: a producer whose records are mostly refused is held off instead of judged on and on."""

    breaker_window: PositiveInt = 256
    """Records of a producer, the last ones, whose refused share decides."""
    breaker_min_records: PositiveInt = 32
    """Records of a producer that must have been judged before its breaker may open."""
    breaker_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The breaker opens where more than this share of them was refused; 1 never opens it."""
    breaker_probe_every: PositiveInt = 16
    """While it is open, one record in this many is judged for testing; the others go to quarantine as breaker_open."""
    breaker_probes_to_close: PositiveInt = 8
    """Tested records accepted in a row after which it closes again."""


class ReplaySection(Section):
    """Experience that is learned again: the good of the last rounds (hot) and history (cold)."""

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a batch's trajectories that are replayed; 0 is off."""
    hot_share: Annotated[float, Field(ge=0, le=1)] = 0.75
    """Share of the replayed ones that come from hot; what one tier lacks comes from the other."""
    weighting: Literal["uniform", "recency", "positive"] = "uniform"
    """Which are drawn more often inside a tier: none; the younger; those with a positive advantage."""
    half_life_updates: PositiveFloat = 20.0
    """Under ``recency``: updates after which a trajectory is drawn half as often."""
    positive_weight: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 4.0
    """Under ``positive``: how many times as often a trajectory with a positive advantage is drawn as one without."""
    only_positive: bool = False
    """Draw nothing but trajectories with a positive advantage (self-imitation, arXiv:1806.05635). Failures that come back
    without the successes beside them unlearn what both share: set this wherever successes are drawn more often."""
    importance_exponent: Annotated[float, Field(ge=0, le=1)] = 0.4
    """How far the loss weights correct the choice (arXiv:1511.05952): 0 not at all, 1 back to a uniform draw."""
    hot_rounds: PositiveInt = 8
    """Updates whose good trajectories stay in hot."""
    hot_bytes: PositiveInt = 256 * 1024 * 1024
    """Bytes hot may take in memory; the oldest round goes first, in a round the least good."""
    hot_min_advantage_quantile: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Good is a positive advantage that reaches this quantile of its round's positive advantages; 0 takes them all."""
    quotas: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    """Largest share of a draw by name of the environment, rounded up to whole trajectories; what it cuts off goes to
    the other environments."""
    max_staleness_updates: PositiveInt | None = None
    """Updates after which a trajectory is not replayed any more; unset is never."""
    cold_cache_bytes: PositiveInt = 2 * 1024 * 1024 * 1024
    """Bytes the local cache of cold may take on disk. It can be deleted at any time; where it is smaller than the
    history that is drawn from, draws read the lake again and again."""


class CheckpointSection(Section):
    """Weights and optimiser state on disk."""

    every_updates: NonNegativeInt = 10
    """Updates between checkpoints; 0 keeps only the last one."""
    keep: PositiveInt = 3
    """Checkpoints kept besides the first and the last."""
    accept_changed: tuple[Literal["env", "reward", "prompt"], ...] = ()
    """Versions that may be others in a resume although no setting asks for it (the environment's code or data changed)."""


class DebugSection(Section):
    """Ways to run one half of the loop."""

    mode: Literal["train", "rollout_only", "learn_from_record"] = "train"
    """Everything; or collect and store without learning; or learn from the stored trajectories of source_run."""
    source_run: Path | None = None
    """Run folder whose training trajectories learn_from_record uses."""

    @model_validator(mode="after")
    def _source_belongs_to_mode(self) -> Self:
        if (self.mode == "learn_from_record") != (self.source_run is not None):
            raise ValueError("debug.source_run is set exactly when debug.mode is learn_from_record")
        return self


class Recipe(Section):
    """A whole recipe, one field per section of the TOML file."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$")
    """Name of the recipe; the default run id starts with it."""
    run: RunSection = RunSection()
    env: EnvSection = EnvSection()
    tasks: TasksSection = TasksSection()
    prompt: PromptSection = PromptSection()
    model: ModelSection = ModelSection()
    warmstart: WarmstartSection = WarmstartSection()
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    engine: EngineSection = EngineSection()
    learner: LearnerSection = LearnerSection()
    topology: TopologySection = TopologySection()
    evaluation: EvaluationSection = EvaluationSection()
    store: StoreSection = StoreSection()
    gate: GateSection = GateSection()
    replay: ReplaySection = ReplaySection()
    checkpoint: CheckpointSection = CheckpointSection()
    debug: DebugSection = DebugSection()

    @property
    def environments(self) -> tuple[MixEntry, ...]:
        """The environments of the run: those of the mix, or the one of section env under the name ``env``."""
        only = MixEntry.model_construct(name="env", kind=self.env.kind, params=self.env.params, weight=1.0)
        return self.tasks.mix or (only,)

    @model_validator(mode="after")
    def _tasks_fit(self) -> Self:
        if self.tasks.mix and self.env != EnvSection():
            raise ValueError(
                f"env.kind = {self.env.kind!r} and tasks.mix both say what to train in; make the former an entry of the "
                "latter, or leave it out"
            )
        if self.rollout.refill != "none" and self.learner.advantages in {"reinforce_pp", "gae"}:
            raise ValueError(
                f"rollout.refill = {self.rollout.refill!r} replaces groups whose rewards are equal, and "
                f"learner.advantages = {self.learner.advantages!r} learns from every group; set rollout.refill = 'none'"
            )
        if self.rollout.refill != "none" and self.debug.mode != "train":
            raise ValueError(
                f"rollout.refill = {self.rollout.refill!r} belongs to debug.mode = 'train': nothing is learned beside the "
                "collecting here; set it to 'none'"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.learner.minibatches > self.rollout.tasks_per_batch * self.rollout.samples_per_task:
            raise ValueError(
                f"learner.minibatches = {self.learner.minibatches} is more than the "
                f"{self.rollout.tasks_per_batch * self.rollout.samples_per_task} episodes of an update "
                "(rollout.tasks_per_batch x rollout.samples_per_task); lower it"
            )
        groupless = self.learner.advantages in {"reinforce_pp", "gae"}
        grouped = not groupless or self.learner.reward_normalization == "group"
        if grouped and self.rollout.samples_per_task < 2 and self.debug.mode == "train":
            raise ValueError(
                "rollout.samples_per_task = 1 leaves a group baseline nothing to compare with; use at least 2"
            )
        if self.sampling.training.temperature == 0 and self.debug.mode == "train":
            raise ValueError(
                "sampling.training.temperature = 0 is greedy: no exploration to learn from; use a value > 0"
            )
        if self.sampling.training.params().filtered and self.learner.old_logprobs == "recorded":
            raise ValueError(
                "sampling.training filters the distribution (top_p, top_k or repetition_penalty), so its recorded "
                "log-probabilities are not the policy's; set learner.old_logprobs = 'recomputed'"
            )
        if self.rollout.max_step_tokens >= self.rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_step_tokens = {self.rollout.max_step_tokens} leaves no room for a prompt in "
                f"rollout.max_context_tokens = {self.rollout.max_context_tokens}; raise the latter"
            )
        if self.replay.share > 0 and self.learner.critic != "none":
            raise ValueError(
                f"replay.share = {self.replay.share} with learner.critic = {self.learner.critic!r}: what an older policy "
                "earned is no target for the values of this one; set replay.share = 0, or learner.critic = 'none'"
            )
        if self.replay.share > 0 and self.debug.mode == "learn_from_record":
            raise ValueError(
                f"replay.share = {self.replay.share} has no meaning where debug.mode is learn_from_record: everything "
                "comes from the record there; set it to 0"
            )
        if self.replay.share > 0 and self.learner.kl_in == "reward":
            raise ValueError(
                f"replay.share = {self.replay.share} with learner.kl_in = 'reward': a replayed trajectory is compared with "
                "recorded rewards, which hold no KL; set learner.kl_in = 'loss', or replay.share = 0"
            )
        if self.debug.mode != "rollout_only":
            self._check_pieces()
        return self

    def _check_pieces(self) -> None:
        """Refuse what cannot be learned: the longest piece in no pass, or a ratio across different contexts."""
        learner, context = self.learner, self.rollout.max_context_tokens
        cuts = 0 < learner.segment_tokens < context
        longest, setting, what = (
            (learner.segment_tokens, "learner.segment_tokens", "a piece")
            if cuts
            else (context, "rollout.max_context_tokens", "the longest episode")
        )
        if learner.micro_batch_tokens < longest:
            raise ValueError(
                f"learner.micro_batch_tokens = {learner.micro_batch_tokens} is less than {setting} = {longest}: "
                f"{what} would fit in no forward pass; raise the former, or lower the latter"
            )
        if cuts and learner.old_logprobs == "recorded":
            raise ValueError(
                f"learner.segment_tokens = {learner.segment_tokens} cuts episodes of up to "
                f"rollout.max_context_tokens = {context} tokens: behind a cut the learner's log-probabilities lack context "
                "that the recorded ones had, and their ratio means nothing; set learner.old_logprobs = 'recomputed'"
            )
        if cuts and learner.kl_in == "reward":
            raise ValueError(
                f"learner.segment_tokens = {learner.segment_tokens} with learner.kl_in = 'reward': behind a cut the "
                "reference lacks context that the sampler had; set learner.kl_in = 'loss', or segment_tokens = 0"
            )
