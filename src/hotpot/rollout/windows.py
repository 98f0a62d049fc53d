"""The next prompt of an episode under its context limit: what :mod:`hotpot.rollout.overflow` decides, carried out.

Owns the conversation, and the request for a note where the recipe's policy is to segment. Knows no engine and no
environment, and decides nothing: it renders the windows it is asked the length of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hotpot.config import RolloutSection
from hotpot.errors import EngineError
from hotpot.rollout import overflow
from hotpot.rollout.bridge import Bridge
from hotpot.rollout.conversation import Conversation
from hotpot.rollout.overflow import Lengths, Room, Verdict, Window
from hotpot.rollout.prompt import Output, Prompt, Rewrite
from hotpot.types import ContextChange, Message, Role


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NextPrompt:
    """What goes to the model next. ``max_tokens`` is the most it may sample, the context's own limit aside."""

    prompt: Prompt
    max_tokens: int
    change: ContextChange = ContextChange.NONE
    dropped_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pending:
    """A note was asked for: the length of the whole prompt, and the window for the case that none comes of it."""

    whole: int
    window: Window


class Windows:
    """One episode's conversation, kept within ``max_context_tokens`` by the policy of ``limits``."""

    def __init__(self, conversation: Conversation, limits: RolloutSection, max_context_tokens: int) -> None:
        self._conversation = conversation
        self._limits = limits
        self._ask = Message(role=Role.USER, content=limits.handover_request)
        self._pending: _Pending | None = None
        segments = limits.context_overflow == "segment"
        self._room = Room(
            context=max_context_tokens,
            step=limits.max_step_tokens,
            request=conversation.cost(self._ask) if segments else 0,
            note=limits.handover_tokens if segments else 0,
        )

    @property
    def asked(self) -> bool:
        """Whether the model was asked for a note that has not come."""
        return self._pending is not None

    def opening(self, prompt: Prompt) -> NextPrompt | None:
        """Return the first prompt; None where it leaves no room to sample a token."""
        return self._plain(prompt) if self._room.holds(len(prompt.tokens)) else None

    def go_on(self, output: Output, messages: Sequence[Message], context_tokens: int) -> NextPrompt | None:
        """Add what was said behind a context of ``context_tokens`` (``output`` included); None where the episode ends."""
        limits, before = self._limits, None
        if limits.context_overflow == "segment":
            before = self._conversation.branch()
        prompt = self._conversation.extend(output, messages)
        whole = _length(prompt, context_tokens)
        if limits.context_overflow == "end" or self._room.leaves_reserve(whole):
            return self._plain(prompt) if self._room.holds(whole) else None
        request = before.extend(output, (self._ask,)) if before is not None else None
        decision = overflow.decide(
            limits.context_overflow,
            self._room,
            self._lengths(),
            whole=whole,
            asked=0 if request is None else _length(request, context_tokens),
            measure=lambda window: len(self._show(window, self._standing())[1].tokens),
            noted=self._conversation.bridge is not None,
        )
        return self._carry_out(decision, prompt, request, whole)

    def take_note(self, output: Output) -> NextPrompt:
        """Go on behind the step that wrote the note; ``output`` as :meth:`hotpot.rollout.Dialect.parse_note` reads it."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise EngineError("a note came that was not asked for; call take_note only where `asked` is true")
        written = next((part for part in output.body if not isinstance(part, str)), None)
        if written is not None:
            note = Bridge(note=output.tokens[slice(*written)])
            window = overflow.hand_over(
                self._room,
                self._lengths(),
                lambda window: len(self._show(window, note)[1].tokens),
                whole=pending.whole,
            )
            if window is not None:
                return self._shorten(window, note, ContextChange.SEGMENTED, pending.whole)
        return self._shorten(pending.window, self._standing(), ContextChange.FALLBACK, pending.whole)

    def _carry_out(
        self, decision: overflow.Decision, prompt: Prompt, request: Prompt | None, whole: int
    ) -> NextPrompt | None:
        if decision.verdict is Verdict.END:
            return None
        if decision.window is None:
            return self._plain(prompt)
        if decision.verdict is Verdict.ASK and request is not None:
            self._pending = _Pending(whole=whole, window=decision.window)
            return NextPrompt(
                prompt=request, max_tokens=self._limits.handover_tokens, change=ContextChange.HANDOVER
            )
        segments = self._limits.context_overflow == "segment"
        change = ContextChange.FALLBACK if segments else ContextChange.TRUNCATED
        return self._shorten(decision.window, self._standing(), change, whole)

    def _plain(self, prompt: Prompt) -> NextPrompt:
        return NextPrompt(prompt=prompt, max_tokens=self._limits.max_step_tokens)

    def _shorten(self, window: Window, bridge: Bridge, change: ContextChange, whole: int) -> NextPrompt:
        self._conversation, prompt = self._show(window, bridge)
        return NextPrompt(
            prompt=prompt,
            max_tokens=self._limits.max_step_tokens,
            change=change,
            dropped_tokens=whole - len(prompt.tokens),
        )

    def _show(self, window: Window, bridge: Bridge) -> tuple[Conversation, Rewrite]:
        return self._conversation.window(window.left_out, bridge if window.bridged else None)

    def _standing(self) -> Bridge:
        """Return what truncation puts in the place of exchanges: the note that was handed over last, if there is one."""
        return self._conversation.bridge or Bridge()

    def _lengths(self) -> Lengths:
        opening, exchanges = self._conversation.lengths()
        return Lengths(opening=opening, exchanges=exchanges)


def _length(prompt: Prompt, context_tokens: int) -> int:
    return len(prompt.tokens) + (0 if isinstance(prompt, Rewrite) else context_tokens)
