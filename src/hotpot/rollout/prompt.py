"""What a dialect hands over: tokens that continue a conversation, and sampled tokens as read. Records only."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.rollout.syntax import Spans
from hotpot.types import Action


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """Tokens that continue a conversation, int32 ``[n]``, and the spans that cover them."""

    tokens: NDArray[np.int32]
    spans: Spans


class Rewrite(Prompt):
    """A whole new prompt: the template shows the conversation so far differently from the recorded tokens."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Output:
    """Sampled tokens, read. ``ended``: whether the last one is a stop token. ``spans`` cover all of them.

    ``body`` is the message's content as literals and ranges of tokens, as a template is to see it.
    """

    tokens: NDArray[np.int32]
    ended: bool
    action: Action
    spans: Spans
    body: tuple[str | tuple[int, int], ...]
