"""Prompts that several requests have in common: who computes one, and who waits for it.

The samples of a group ask the same: the first of them computes the prompt, the others copy its keys and values. Owns who
was given which prompt last. Knows no weights and no cache: what a slot holds by now is the engine's to verify. A pure
state machine.

Invariants: a slot waits for at most one other, which waits for none; a prompt has one holder, a slot holds one prompt.
"""

from numpy import int32
from numpy.typing import NDArray


class SharedPrompts:
    """Slots by the prompt they were given, and the slots that wait for one whose prompt is not complete."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._held: dict[int, bytes] = {}
        self._followers: dict[int, list[int]] = {}

    def holder(self, prompt: NDArray[int32]) -> int | None:
        """Return the slot that was given ``prompt`` last to compute it, if any; it may hold something else by now."""
        return self._holders.get(prompt.tobytes())

    def lead(self, slot: int, prompt: NDArray[int32]) -> None:
        """Let ``slot`` be the holder of ``prompt``, and of nothing else."""
        self._forget(slot)
        key = prompt.tobytes()
        if key in self._holders:
            del self._held[self._holders[key]]
        self._holders[key] = slot
        self._held[slot] = key

    def follow(self, slot: int, leader: int) -> None:
        """Let ``slot``, which holds nothing of its own, wait until the prompt of ``leader`` is complete."""
        self._forget(slot)
        self._followers.setdefault(leader, []).append(slot)

    def release(self, leader: int) -> list[int]:
        """Return the slots that waited for ``leader``, in the order they came; they wait no longer."""
        return self._followers.pop(leader, [])

    def _forget(self, slot: int) -> None:
        key = self._held.pop(slot, None)
        if key is not None:
            del self._holders[key]
