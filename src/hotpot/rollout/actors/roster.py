"""Which actors there are, whose turn it is, and what became of those that are gone. No actor is touched here.

Owns how actors are named: ``actor-3`` of ``group-0``, and behind it, where it was replaced, ``actor-3.1``, ``actor-3.2``:
an id is never used twice. Invariant: each group has always as many actors as it began with.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from hotpot.config import ActorsSection


class Roster:
    """The actors of a run: ``members`` by their group, in the order in which they are dealt."""

    def __init__(self, members: Mapping[str, Sequence[str]]) -> None:
        self._members = {group: list(actors) for group, actors in members.items()}
        self._next = dict.fromkeys(self._members, 0)
        self._gone: dict[str, str] = {}
        self._places = {
            actor: (group, place)
            for group, members in self._members.items()
            for place, actor in enumerate(members)
        }

    @classmethod
    def of(cls, settings: ActorsSection) -> "Roster":
        """Return a fresh roster: ``groups`` times ``actors_per_group`` actors, numbered through."""
        size = settings.actors_per_group
        return cls(
            {
                f"group-{group}": [f"actor-{group * size + place}" for place in range(size)]
                for group in range(settings.groups)
            }
        )

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (actor, its group), in order."""
        for group, members in self._members.items():
            for actor in members:
                yield actor, group

    def deal(self, group: str, fit: Callable[[str], bool] = lambda _: True) -> str:
        """Return the next actor of ``group`` in turn, passing over those that are not ``fit`` where any is.

        Raises ValueError where there is no such group.
        """
        if group not in self._members:
            raise ValueError(f"there is no actor group {group!r}; there are {', '.join(self._members)}")
        members, first = self._members[group], self._next[group]
        turns = [(first + n) % len(members) for n in range(len(members))]
        turn = next((turn for turn in turns if fit(members[turn])), first)
        self._next[group] = (turn + 1) % len(members)
        return members[turn]

    def replace(self, actor_id: str, reason: str) -> str:
        """Put a fresh actor in the place of ``actor_id`` and return its id.

        Raises ValueError where ``actor_id`` is none of those that are there.
        """
        if self.gone(actor_id) is not None:
            raise ValueError(
                f"actor {actor_id!r} can't be replaced: {self.gone(actor_id)}; replace one of "
                f"{', '.join(name for name, _ in self)}"
            )
        group, place = self._places.pop(actor_id)
        name, _, number = actor_id.partition(".")
        fresh = f"{name}.{int(number or 0) + 1}"
        self._members[group][place] = fresh
        self._places[fresh] = (group, place)
        self._gone[actor_id] = f"actor {actor_id} was replaced: {reason}"
        return fresh

    def gone(self, actor_id: str) -> str | None:
        """Return why ``actor_id`` takes no calls, None where it is one of those that are there."""
        if actor_id in self._places:
            return None
        return self._gone.get(actor_id, f"there is no actor {actor_id!r}")
