"""What one forward pass computes: tokens of many requests in one stream, chosen within a budget.

Owns the choice and its layout: first the requests that have exactly one token to compute (they are generating), then
pieces of prompts. Knows no model.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.engine.embedded.rows import RowTable

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """The tokens of one forward pass. All arrays int64.

    ``rows``, ``positions`` ``[N]``: where each token belongs. The first ``num_singles`` are the only token of their
    row, in ascending order of rows; the rest are ``piece_lengths`` tokens of each of ``piece_rows`` from ``piece_starts``
    on. ``wanted`` ``[M]``: the tokens whose logits sample the next token, in ascending order of rows.
    """

    rows: Ints
    positions: Ints
    num_singles: int
    piece_rows: Ints
    piece_starts: Ints
    piece_lengths: Ints
    wanted: Ints

    @property
    def wanted_rows(self) -> Ints:
        """Rows that sample a token after this pass, ascending."""
        return self.rows[self.wanted]


def plan_stream(running: RowTable, generating: Ints, prompts: list[int], budget: int) -> Stream:
    """Return the next pass over ``generating`` (rows, ascending) and as much of ``prompts`` as the budget allows.

    ``prompts`` are rows in the order they were admitted, so that none is overtaken for ever. ``budget`` bounds the
    pieces' number times the longest of them; a longer prompt is computed in pieces, one a pass.
    """
    chosen: list[int] = []
    longest = 0
    for row in prompts:
        longest = max(longest, min(int(running.length[row] - running.cached[row]), budget))
        if chosen and longest * (len(chosen) + 1) > budget:
            break
        chosen.append(row)
    pieces = np.array(chosen, dtype=np.int64)
    starts = running.cached[pieces]
    lengths = np.minimum(running.length[pieces] - starts, budget)
    owner = np.repeat(np.arange(len(pieces)), lengths)
    ends = np.cumsum(lengths)
    inside = np.arange(len(owner)) - (ends - lengths)[owner]
    complete = starts + lengths == running.length[pieces]
    rows = np.concatenate([generating, pieces[owner]])
    wanted = np.concatenate([np.arange(len(generating)), len(generating) + ends[complete] - 1])
    return Stream(
        rows=rows,
        positions=np.concatenate([running.cached[generating], starts[owner] + inside]),
        num_singles=len(generating),
        piece_rows=pieces,
        piece_starts=starts,
        piece_lengths=lengths,
        wanted=wanted[np.argsort(rows[wanted])] if len(pieces) else wanted,
    )
