"""Our side: the engine and the learner of a run, wired as a synchronous topology wires them, without the store.

An iteration: the embedded engine generates, completions are decoded and rewarded, the learner learns them, its weights are
published to the engine.
"""

from dataclasses import dataclass

import numpy as np

from hotpot.config.sections import EngineSection, LearnerSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.experience import TrainingSequence
from hotpot.learner import Learner, UpdateResult
from hotpot.models import PolicyTokenizer, keep_freed_memory, load_decoder
from hotpot.rollout import Dialect
from hotpot.types import Generation, GenerationRequest, Purpose, SampleKey, SamplingParams
from learner_parts.turns import Spent
from learner_parts.work import SEED, Work, reward

SAMPLING = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One completion: what was asked, what came, and the group they belong to."""

    group: int
    request: GenerationRequest
    generation: Generation


class HotpotSide:
    """Engine and learner on ``work``'s model. Calling it does the next iteration."""

    def __init__(self, work: Work) -> None:
        keep_freed_memory()  # as a run does; both sides are in one process, so it is the other's too
        self.work = work
        self.tokenizer = PolicyTokenizer.load(work.folder)
        self._dialect = Dialect(self.tokenizer)
        decoder = load_decoder(work.folder)
        self.learner = Learner(
            decoder,
            LearnerSection(
                advantages="group_normalized",
                agreement="first_minibatch",
                minibatches=work.minibatches,
                learning_rate=work.learning_rate,
            ),
            total_updates=1_000_000,  # no decay on either side
            seed=SEED,
            temperature=SAMPLING.temperature,
        )
        self.engine = EmbeddedEngine(
            decoder.config,
            decoder.state_dict(),
            settings=EngineSection(max_concurrency=work.completions),
            max_context_tokens=max(len(self.prompt(i)) for i in range(len(work.openings))) + work.length,
            sampling={Purpose.TRAINING: SAMPLING},
        )
        self.iteration = 0
        self.padding_shares: list[float] = []

    def __call__(self) -> Spent:
        """Do the next iteration, all of it; return what it took."""
        started = Spent.now()
        self.learn(self.sequences(self.generate()))
        self.engine.publish(self.learner.weights(), self.engine.info().policy_version + 1)
        return Spent.now() - started

    def prompt(self, index: int) -> np.ndarray:
        """Return the tokens of the work's prompt number ``index``, int32."""
        opening = self.work.openings[index]
        return self._dialect.open(opening.messages, opening.tools)[1].tokens

    def generate(self) -> list[Completion]:
        """Return the completions of the next iteration's prompts, in the order of these, samples of one together."""
        work, first = self.work, self.iteration * self.work.tasks
        requests = {}
        for issue in range(first, first + work.tasks):
            prompt = self.prompt(issue % len(work.openings))
            for sample in range(work.samples):
                name = f"{issue}.{sample}"
                requests[name] = (issue, self._request(name, prompt, issue, sample))
        self.iteration += 1
        for _, request in requests.values():
            self.engine.submit(request)
        found: dict[str, Generation] = {}
        while not self.engine.idle:
            found |= {generation.request_id: generation for generation in self.engine.step()}
        return [
            Completion(group=issue, request=request, generation=found[name])
            for name, (issue, request) in requests.items()
        ]

    def sequences(self, completions: list[Completion]) -> list[TrainingSequence]:
        """Return what the learner is given of ``completions``, rewarded."""
        return [self._sequence(completion) for completion in completions]

    def learn(self, sequences: list[TrainingSequence]) -> UpdateResult:
        """Learn ``sequences``; raise AssertionError where that was not all of them, in all steps."""
        result = self.learner.update(
            sequences,
            update=self.learner.update_number + 1,
            policy_version=self.engine.info().policy_version,
        )
        assert result.num_loss_tokens == self.work.completions * self.work.length
        assert len(result.taken) == self.work.minibatches
        self.padding_shares.append(
            result.num_padding_tokens
            / (result.num_padding_tokens + result.num_tokens - result.num_shared_tokens)
        )
        return result

    def timed(self, sequences: list[TrainingSequence]) -> Spent:
        """Learn ``sequences``; return what it took."""
        started = Spent.now()
        self.learn(sequences)
        return Spent.now() - started

    def _request(self, name: str, prompt: np.ndarray, issue: int, sample: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=name,
            session_id=name,
            prompt=prompt,
            stop_tokens=(),  # every completion has the same length
            max_tokens=self.work.length,
            purpose=Purpose.TRAINING,
            sampling=SAMPLING,
            key=SampleKey(seed=SEED, issue=issue, sample=sample, step=0),
        )

    def _sequence(self, completion: Completion) -> TrainingSequence:
        generation, given = completion.generation, len(completion.request.prompt)
        assert len(generation.tokens) == self.work.length

        def after(filler: float, values: np.ndarray) -> np.ndarray:
            return np.concatenate([np.full(given, filler, values.dtype), values])

        versions = np.repeat(
            np.array([span.policy_version for span in generation.versions], dtype=np.int32),
            [span.length for span in generation.versions],
        )
        return TrainingSequence(
            trajectory_id=completion.request.request_id,
            group_id=str(completion.group),
            segment=0,
            tokens=np.concatenate([completion.request.prompt, generation.tokens]),
            loss_mask=after(False, np.ones(len(generation.tokens), dtype=np.bool_)),
            behaviour_logprobs=after(0, generation.behaviour_logprobs),
            model_logprobs=after(0, generation.model_logprobs),
            token_policy_version=after(-1, versions),
            reward=reward(self.tokenizer.decode(generation.tokens)),
        )
