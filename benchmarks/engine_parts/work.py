"""The work every side does: episodes of several steps that share a system prompt, and batches of single prompts.

Owns what must be the same. Knows no side. Prompts are real text (the licence and the documentation), cut by tokens; a round
has text of its own, so nothing is kept from the round before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotpot.models import PolicyTokenizer

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSizes:
    """``episodes`` at once, each of ``steps`` steps; the rest in tokens. Every length is exact: nothing ends early."""

    episodes: int = 32
    steps: int = 4
    system: int = 512
    task: int = 60
    observation: int = 40
    sampled: int = 32

    @property
    def num_sampled(self) -> int:
        """Tokens sampled in all."""
        return self.episodes * self.steps * self.sampled

    @property
    def num_prompt(self) -> int:
        """Prompt tokens of all requests together, as if each were computed on its own."""
        first, growth = self.system + self.task, self.sampled + self.observation
        return self.episodes * sum(first + step * growth for step in range(self.steps))

    @property
    def longest(self) -> int:
        """Tokens of an episode's whole context."""
        return self.system + self.task + self.steps * self.sampled + (self.steps - 1) * self.observation


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """``prompts`` at once, lengths from ``shortest`` to ``longest`` tokens, each answered by ``sampled`` tokens."""

    prompts: int = 32
    shortest: int = 16
    longest: int = 256
    sampled: int = 32

    @property
    def num_sampled(self) -> int:
        """Tokens sampled in all."""
        return self.prompts * self.sampled

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each prompt: up in even steps, and down again."""
        span = self.longest - self.shortest
        even = [self.shortest + span * index // max(self.prompts - 1, 1) for index in range(self.prompts)]
        return tuple(even[0::2] + even[1::2][::-1])


class Text:
    """A long run of tokens of real text."""

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        pages = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
        self._tokens: list[int] = tokenizer.encode_text(
            "\n".join(page.read_text() for page in pages)
        ).tolist()

    def piece(self, place: int, length: int) -> list[int]:
        """Return ``length`` tokens that begin anywhere, the same for the same ``place``; the text goes round."""
        tokens = self._tokens
        start = place * 7919 % len(tokens)
        return [tokens[(start + index) % len(tokens)] for index in range(length)]


@dataclass(slots=True, kw_only=True)
class Episode:
    """One episode as its driver sees it: the context so far, and what is told between the steps."""

    number: int
    context: list[int]
    observations: Sequence[Sequence[int]]
    sampled: int
    step: int = 0

    def take(self, answer: Sequence[int]) -> bool:
        """Take the answer of a step; return whether there is another. Raises AssertionError on another length."""
        assert len(answer) == self.sampled, f"{len(answer)} tokens where {self.sampled} were asked for"
        self.context += answer
        if self.step == len(self.observations):
            return False
        self.context += self.observations[self.step]
        self.step += 1
        return True


def episodes(text: Text, sizes: EpisodeSizes, round_number: int) -> list[Episode]:
    """Return the episodes of a round: one system prompt, a task and observations of its own for each."""
    base = 10_000 * (round_number + 1)
    system = text.piece(base, sizes.system)
    made = []
    for number in range(sizes.episodes):
        place = base + 100 * (number + 1)
        made.append(
            Episode(
                number=number,
                context=[*system, *text.piece(place, sizes.task)],
                observations=[text.piece(place + step, sizes.observation) for step in range(1, sizes.steps)],
                sampled=sizes.sampled,
            )
        )
    return made


def batch(text: Text, sizes: BatchSizes, round_number: int) -> list[list[int]]:
    """Return the prompts of a round."""
    base = 10_000 * (round_number + 1)
    return [text.piece(base + number, length) for number, length in enumerate(sizes.lengths)]
