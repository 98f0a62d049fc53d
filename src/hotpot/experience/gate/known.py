"""Which versions a run has explained in its table ``versions``. Pure; knows no store and no file."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from hotpot.types import VersionRow


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownVersions:
    """The (kind, version) pairs that were explained; kinds are those of table ``versions``.

    A run that has explained no version of a kind yet can't tell a strange one, so all of that kind pass; from the first
    explanation on, only explained ones do.
    """

    explained: frozenset[tuple[str, str]] = frozenset()
    kinds: frozenset[str] = frozenset()

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Self:
        """Return what is known from (kind, version) pairs."""
        explained = frozenset(pairs)
        return cls(explained=explained, kinds=frozenset(kind for kind, _ in explained))

    def with_rows(self, rows: Iterable[Any]) -> "KnownVersions":
        """Return what is known once ``rows`` are recorded; rows of other tables explain nothing."""
        new = {(row.kind, row.version) for row in rows if type(row) is VersionRow}
        return KnownVersions.of(self.explained | new) if new - self.explained else self

    def lacks(self, kind: str, version: str) -> bool:
        """Whether ``version`` was never explained though others of its kind were."""
        return kind in self.kinds and (kind, version) not in self.explained
