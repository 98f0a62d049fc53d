"""The recipe: every section of a run's settings, and the rules between them.

Each setting stands in :mod:`hotpot.config.sections`, with its one default and its meaning under it. Unknown keys are
errors. Sections with variants are tagged by ``kind``. Nothing here reads a file or imports torch.
"""

import math
from typing import Self

from pydantic import Field, model_validator

from hotpot.config.sections.base import Section
from hotpot.config.sections.engines import AnyEngineSection, OpenAIEngineSection
from hotpot.config.sections.learner import LearnerSection
from hotpot.config.sections.models import ModelSection, WarmstartSection
from hotpot.config.sections.rollout import EngineSection, EvaluationSection, RolloutSection, SamplingSection
from hotpot.config.sections.run import CheckpointSection, DebugSection, RunSection
from hotpot.config.sections.store import GateSection, ReplaySection, StoreSection
from hotpot.config.sections.tasks import EnvSection, MixEntry, PromptSection, TasksSection
from hotpot.config.sections.topology import ActorsSection, QueueSection, SupervisionSection, TopologySection


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
    engine: AnyEngineSection = EngineSection()
    learner: LearnerSection = LearnerSection()
    topology: TopologySection = TopologySection()
    queue: QueueSection = QueueSection()
    actors: ActorsSection = ActorsSection()
    supervision: SupervisionSection = SupervisionSection()
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

    @property
    def episodes_per_task(self) -> int:
        """Episodes of a task that are issued so that rollout.samples_per_task count: more by the share actors.over_issue,
        rounded up."""
        samples = self.rollout.samples_per_task
        return samples + math.ceil(round(samples * self.actors.over_issue, 9))

    @model_validator(mode="after")
    def _tasks_fit(self) -> Self:
        if self.tasks.mix and self.env != EnvSection():
            raise ValueError(
                f"env.kind = {self.env.kind!r} and tasks.mix both say what to train in; make the former an entry of the "
                "latter, or leave it out"
            )
        if self.rollout.refill != "none" and self.learner.groupless:
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
    def _engine_fits(self) -> Self:
        engine = self.engine
        if isinstance(engine, EngineSection):
            return self
        if self.run.deterministic:
            raise ValueError(
                f"run.deterministic = true promises the same bits, and engine.kind = {engine.kind!r} has random numbers and "
                "batches of its own; set engine.kind = 'embedded', or run.deterministic = false"
            )
        if engine.max_tokens_in_flight < self.rollout.max_context_tokens:
            raise ValueError(
                f"engine.max_tokens_in_flight = {engine.max_tokens_in_flight} is less than rollout.max_context_tokens = "
                f"{self.rollout.max_context_tokens}: the longest request could never go out; raise the former"
            )
        if (
            isinstance(engine, OpenAIEngineSection)
            and engine.weights == "fixed"
            and self.debug.mode == "train"
        ):
            raise ValueError(
                "engine.kind = 'openai' with engine.weights = 'fixed' can't serve what is learned; say how it takes weights "
                "(engine.weights), use engine.kind = 'vllm', or set debug.mode = 'rollout_only'"
            )
        return self

    @model_validator(mode="after")
    def _topology_fits(self) -> Self:
        topology, actors = self.topology, self.actors
        asynchronous = topology.kind != "sync"
        if self.run.deterministic and asynchronous and not topology.serial:
            raise ValueError(
                f"run.deterministic = true promises the same bits, and topology.kind = {topology.kind!r} takes batches as they "
                "come; set topology.serial = true, or run.deterministic = false"
            )
        if (topology.serial or self.run.deterministic) and actors.kind != "inline":
            raise ValueError(
                f"actors.kind = {actors.kind!r} brings replies in any order, and "
                f"{'topology.serial' if topology.serial else 'run.deterministic'} = true wants one that repeats; set "
                "actors.kind = 'inline'"
            )
        if self.run.deterministic and actors.over_issue and not asynchronous:
            raise ValueError(
                f"actors.over_issue = {actors.over_issue} cuts by who finishes first, and an exact resume (run.deterministic = "
                "true) runs episodes again that were cut; set one of them to 0 or false"
            )
        if topology.serial and topology.publish_every_s is not None:
            raise ValueError(
                f"topology.publish_every_s = {topology.publish_every_s} hangs on the clock, and topology.serial = true on "
                "nothing but the recipe; use topology.publish_every_updates"
            )
        if asynchronous and self.debug.mode == "train" and self.rollout.refill != "none":
            raise ValueError(
                f"rollout.refill = {self.rollout.refill!r} fills up one batch before it is learned, and topology.kind = "
                f"{topology.kind!r} has none such; set rollout.refill = 'none' (tasks.pools choose tasks with signal)"
            )
        return self

    @model_validator(mode="after")
    def _queue_fits(self) -> Self:
        topology, queue = self.topology, self.queue
        if topology.kind != "async":
            return self
        batch = self.rollout.tasks_per_batch * self.rollout.samples_per_task
        if queue.batch_tokens is None and queue.depth < batch:
            raise ValueError(
                f"queue.depth = {queue.depth} is less than the {batch} trajectories of one batch (rollout.tasks_per_batch x "
                "rollout.samples_per_task); raise it, or set queue.batch_tokens"
            )
        behind = topology.publish_every_updates - 1
        if queue.max_staleness is not None and queue.max_staleness < behind and not topology.publish_every_s:
            raise ValueError(
                f"queue.max_staleness = {queue.max_staleness} is below topology.publish_every_updates - 1 = {behind}: before "
                "each publish everything that is sampled would be too old to learn from; raise the former, or publish more often"
            )
        if queue.when_late == "replay" and not self.replay.share:
            raise ValueError(
                "queue.when_late = 'replay' fills batches up from section replay, and replay.share = 0 is off; set the latter, "
                "or queue.when_late = 'smaller'"
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
        grouped = not self.learner.groupless or self.learner.reward_normalization == "group"
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
        if self.learner.warmup_updates >= self.topology.updates:
            raise ValueError(
                f"learner.warmup_updates = {self.learner.warmup_updates} would warm up for all of topology.updates = "
                f"{self.topology.updates}; lower the former, or raise the latter"
            )
        if self.rollout.max_step_tokens >= self.rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_step_tokens = {self.rollout.max_step_tokens} leaves no room for a prompt in "
                f"rollout.max_context_tokens = {self.rollout.max_context_tokens}; raise the latter"
            )
        self._check_windows()
        if self.replay.share > 0 and self.learner.advantages == "gae":
            raise ValueError(
                f"replay.share = {self.replay.share} with learner.advantages = 'gae': what an older policy earned is no "
                "target for the values of this one; set replay.share = 0, or learner.advantages = 'vtrace', which corrects it"
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

    def _check_windows(self) -> None:
        """Refuse a hand-over that leaves no room for anything else."""
        rollout = self.rollout
        taken = rollout.max_step_tokens + rollout.handover_tokens
        if rollout.context_overflow == "segment" and taken >= rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_step_tokens + rollout.handover_tokens = {taken} leave no room for a prompt in "
                f"rollout.max_context_tokens = {rollout.max_context_tokens}, where rollout.context_overflow = 'segment' keeps "
                "them free; lower rollout.handover_tokens, or raise the context"
            )

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
