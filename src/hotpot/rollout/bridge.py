"""What stands in a window for what was left out of it: a fixed marker, or the note that was handed over.

It is added to the opening's last message, which every template can show; a message of its own would be one that some
templates refuse. The marker and the heading of the note are this module's text, the note is what the model sampled, id by
id.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.rollout.template import Shape

MARKER = "\n\n[earlier steps left out]"
"""Stands for exchanges that were left out."""
HEADING = "\n\n[notes on earlier steps]\n"
"""Stands before a note that was handed over."""

Payload = tuple[str | NDArray[np.int32], ...]
"""What fills the slots of one message: text, or tokens that are kept as they are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bridge:
    """A marker, or the ``note`` int32 ``[n]`` under its heading."""

    note: NDArray[np.int32] | None = None

    def join(self, shape: Shape, payload: Payload) -> tuple[Shape, Payload]:
        """Return a message with the bridge behind its content."""
        if self.note is None:
            return dataclasses.replace(shape, body=(*shape.body, MARKER)), payload
        place = sum(part is None for part in shape.body)
        filled = (*payload[:place], self.note, *payload[place:])
        return dataclasses.replace(shape, body=(*shape.body, HEADING, None)), filled


def holds_note(shape: Shape, part: int) -> bool:
    """Whether slot ``part`` of a message is the note of a bridge."""
    body = shape.body
    return HEADING in body and part == sum(text is None for text in body) - 1
