"""Lengths into rows and passes, within a budget. Owns two ways to do it; knows only numbers.

``padded``: sorted by length, a row each. ``packed``: several to a row, longest first, each into the first row with room.
"""

from collections.abc import Sequence
from typing import Literal

Packing = Literal["padded", "packed"]

PADDING_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens: matrix kernels work in blocks of eight."""

PACKED_ROW_TOKENS = 256
"""Length of a packed row where no sequence is longer: attention computes every pair of tokens in a row."""


def padded(length: int) -> int:
    """Return ``length`` rounded up to a multiple of :data:`PADDING_MULTIPLE`."""
    return -(-length // PADDING_MULTIPLE) * PADDING_MULTIPLE


def arrange(lengths: Sequence[int], *, max_tokens: int, packing: Packing) -> list[list[list[int]]]:
    """Return passes, each a list of rows, each a list of indices into ``lengths``.

    The rows of a pass, all as wide as the widest, are at most ``max_tokens`` tokens; no length is more than that.
    """
    return _padded(lengths, max_tokens) if packing == "padded" else _packed(lengths, max_tokens)


def computed_tokens(lengths: Sequence[int], passes: Sequence[Sequence[Sequence[int]]]) -> int:
    """Return how many tokens ``passes`` compute, padding included, prefixes apart."""
    return sum(
        len(rows) * padded(max(sum(lengths[index] for index in row) for row in rows)) for rows in passes
    )


def _padded(lengths: Sequence[int], max_tokens: int) -> list[list[list[int]]]:
    passes: list[list[list[int]]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        width = min(padded(lengths[index]), max_tokens)
        if not passes or (len(passes[-1]) + 1) * width > max_tokens:
            passes.append([])
        passes[-1].append([index])
    return passes


def _packed(lengths: Sequence[int], max_tokens: int) -> list[list[list[int]]]:
    passes: list[list[list[int]]] = []
    room: list[int] = []
    width = num_rows = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row, free in enumerate(room) if free >= lengths[index]), None)
        if row is None and (not passes or len(room) == num_rows):
            width = min(padded(max(lengths[index], PACKED_ROW_TOKENS)), max_tokens)
            num_rows = max_tokens // width
            passes.append([])
            room = []
        if row is None:
            row = len(room)
            passes[-1].append([])
            room.append(width)
        passes[-1][row].append(index)
        room[row] -= lengths[index]
    return passes
