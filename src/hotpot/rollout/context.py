"""The tokens an episode has on record, and the proof that each prompt handed out was exactly these.

Each recorded chunk (what a step was given, what it sampled) grows the hash chain that the steps carry, and a copy of its
bytes that nobody else can reach. :meth:`Context.prove` compares the array that went to the engine, whole, with these
bytes once the answer is there: so ``prefix_hash`` of a step is the chain over what the engine was really given, cut
where the steps cut it. Arrays handed out are read-only.
"""

import numpy as np
from numpy.typing import NDArray

from hotpot.errors import EngineError
from hotpot.ids import prefix_hash
from hotpot.rollout.prompt import Prompt, Rewrite
from hotpot.rollout.recorder import Place
from hotpot.types import ContextChange


class Context:
    """The tokens of the current segment, and the chained hash over what is recorded of it."""

    def __init__(self, name: str) -> None:
        self.tokens: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._name = name
        self._segment = -1
        self._chain = ""
        self._recorded = b""
        self._sampled: NDArray[np.int32] = self.tokens

    def __len__(self) -> int:
        return len(self.tokens) + len(self._sampled)

    def place(self, turn: int, change: ContextChange, dropped_tokens: int) -> Place:
        """Return where the step whose prompt was added last stands; ``change`` and ``dropped_tokens`` of that prompt."""
        return Place(
            turn=turn,
            segment=self._segment,
            context_tokens=len(self.tokens),
            prefix_hash=self._chain,
            change=change,
            dropped_tokens=dropped_tokens,
        )

    def add_prompt(self, prompt: Prompt) -> None:
        """Extend the context by what was sampled and by ``prompt``, or begin a segment with a rewritten prompt."""
        if self._segment < 0 or isinstance(prompt, Rewrite):
            self._segment += 1
            self.tokens, self._chain, self._recorded = prompt.tokens.copy(), "", b""
        else:
            self.tokens = np.concatenate([self.tokens, self._sampled, prompt.tokens])
        self._sampled = prompt.tokens[:0]
        self.tokens.flags.writeable = False
        self._record(prompt.tokens)

    def prove(self, prompt: NDArray[np.int32]) -> None:
        """Raise :class:`EngineError` unless ``prompt`` (int32 ``[n]``, a request's) is what is on record, whole."""
        if prompt.tobytes() != self._recorded:
            raise EngineError(
                f"the prompt of {self._name}'s request is not its recorded tokens; an engine must not write into a "
                "request's prompt"
            )

    def add_sampled(self, tokens: NDArray[np.int32]) -> None:
        """Take what the model said; it joins the context with the next prompt."""
        self._sampled = tokens
        self._record(tokens)

    def _record(self, tokens: NDArray[np.int32]) -> None:
        self._chain = prefix_hash(tokens, extends=self._chain)
        self._recorded += tokens.tobytes()
