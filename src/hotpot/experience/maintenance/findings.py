"""What a verification says: findings by name, and what was looked at.

Owns the words. Knows no check.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

MOST_FINDINGS = 20
"""Findings of one check that are told one by one; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong. ``check`` is its machine-readable name, ``table`` empty where it is of no table."""

    check: str
    table: str
    detail: str

    def __str__(self) -> str:
        place = f" in {self.table}" if self.table else ""
        return f"{self.check}{place}: {self.detail}"


@dataclass(slots=True, kw_only=True)
class Counts:
    """What a verification looked at, and what it met that is no damage.

    ``unused_files`` belong to no current version (replaced by a compaction, or left by a crash); ``half_files`` are those
    of them that a crash cut. ``unpublished_rows`` lie above the watermark: a writer is at it, or died there.
    """

    tables: int = 0
    files: int = 0
    num_bytes: int = 0
    rows: int = 0
    log_segments: int = 0
    unused_files: int = 0
    unused_bytes: int = 0
    half_files: int = 0
    unpublished_rows: int = 0
    deletions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result. ``skipped`` names the checks that could not be made because of damage, with the reason."""

    findings: tuple[Finding, ...]
    skipped: tuple[tuple[str, str], ...]
    counts: Counts = field(default_factory=Counts)

    @property
    def good(self) -> bool:
        """Whether everything was checked and nothing is wrong."""
        return not self.findings and not self.skipped


def capped(check: str, table: str, details: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each of the first details, and one that counts the rest."""
    left = 0
    for number, detail in enumerate(details):
        if number < MOST_FINDINGS:
            yield Finding(check=check, table=table, detail=detail)
        else:
            left += 1
    if left:
        yield Finding(check=check, table=table, detail=f"and {left} more like these")
