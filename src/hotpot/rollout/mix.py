"""The environments a run trains in, and which of them a task issue goes to.

Owns the draw of the environment: a pure function of (seed, issue). Knows no task. Invariants: names are different, and
so are the versions, or nothing on the record could tell two members apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from hotpot.envs import BoundEnvironment
from hotpot.errors import RecipeError
from hotpot.rollout.draws import chance, choose

ONLY = "env"
"""Name of the environment of a run that has one: the recipe's section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedEnvironment:
    """One environment of a mix. ``weight`` is its part of the issues, relative to the others'."""

    name: str
    environment: BoundEnvironment
    weight: float = 1.0

    @property
    def versions(self) -> tuple[str, str]:
        """Environment and reward version: how records name it."""
        return self.environment.env_version.version, self.environment.reward_version.version


class Mix:
    """The environments of a run, in the recipe's order.

    Raises :class:`RecipeError` where two are the same but for their names.
    """

    def __init__(self, members: Sequence[MixedEnvironment]) -> None:
        self.members = tuple(members)
        self._by_name = {member.name: member for member in self.members}
        by_versions: dict[tuple[str, str], str] = {}
        for member in self.members:
            other = by_versions.setdefault(member.versions, member.name)
            if other != member.name or len(self._by_name) < len(self.members):
                raise RecipeError(
                    f"tasks.mix: {other!r} and {member.name!r} are the same environment ({member.versions[0]}), so the "
                    "record could not tell them apart; name it once, with the sum of the weights"
                )

    @classmethod
    def of(cls, environment: BoundEnvironment) -> Self:
        """Return the mix of one environment."""
        return cls([MixedEnvironment(name=ONLY, environment=environment)])

    def __iter__(self) -> Iterator[MixedEnvironment]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, name: str) -> MixedEnvironment:
        return self._by_name[name]

    def draw(self, seed: int, issue: int) -> tuple[MixedEnvironment, float]:
        """Return the environment of a task issue, and the probability it was drawn with."""
        weights = [member.weight for member in self.members]
        member = self.members[choose(weights, chance(seed, issue, "environment"))]
        return member, member.weight / sum(weights)
