"""What an environment and an agent exchange, in the chat-completion convention."""

from dataclasses import dataclass
from enum import StrEnum

from hotpot.ids import task_id


class Split(StrEnum):
    """Which side of the wall a task stands on. Holdout tasks never touch an update."""

    TRAIN = "train"
    HOLDOUT = "holdout"


class Stage(StrEnum):
    """What a span of tokens is for. Model tokens are thought, tool_call, answer and handover; the others are given to it."""

    SYSTEM = "system"
    INSTRUCTION = "instruction"
    THOUGHT = "thought"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    ANSWER = "answer"
    HANDOVER = "handover"  # a note to itself, for when the context is full


class Role(StrEnum):
    """Who speaks a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class EndReason(StrEnum):
    """Why an episode ended. Only an episode that ended by one of these is a trajectory; a failure is on the attempt."""

    ANSWERED = "answered"
    MAX_STEPS = "max_steps"
    MAX_STEP_TOKENS = "max_step_tokens"
    MAX_CONTEXT = "max_context"
    MAX_SECONDS = "max_seconds"


class ContextChange(StrEnum):
    """What the context limit did to the prompt of a step."""

    NONE = "none"  # nothing: the limit was not met
    TRUNCATED = "truncated"  # the oldest exchanges were left out
    HANDOVER = "handover"  # the model was asked for a note; the environment hears nothing of this step
    SEGMENTED = "segmented"  # all but the newest exchange gave way to that note
    FALLBACK = (
        "fallback"  # truncated, since there was no note to go on with: none fitted, or it was cut or empty
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem instance. ``content`` is canonical JSON that only the environment reads."""

    env: str
    split: Split
    content: str

    @property
    def task_id(self) -> str:
        """The id: a hash over the environment's name and the content, the same in every run."""
        return task_id(self.env, self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool as the model is told of it. ``parameters`` is a JSON schema (an object) as canonical JSON text."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call the model asked for. ``arguments`` is a JSON object as canonical JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message. ``tool_calls`` only on assistant messages, ``name`` (of the tool) only on tool messages."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agent sees first: the opening messages and the tools it may call."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the model did in one step, read from its sampled tokens.

    Exactly one of ``tool_call``, ``answer`` and ``malformed`` is set. ``malformed`` says why the text is neither a
    call nor an answer; the environment replies to it with an error message and the episode goes on.
    """

    tool_call: ToolCall | None = None
    answer: str | None = None
    malformed: str | None = None

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.tool_call, self.answer, self.malformed)) != 1:
            raise ValueError(f"an action is exactly one of tool call, answer and malformed; got {self!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One named component of a step's reward."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the environment returned for one action.

    ``messages`` are the new messages (tool results, errors). ``rewards`` may be empty; the step's reward is their sum.
    ``success`` is the environment's verdict on the whole task and is set exactly when ``done``.
    ``tool_error`` is true where the reply reports a malformed or failed call.
    """

    messages: tuple[Message, ...]
    rewards: tuple[Reward, ...] = ()
    done: bool = False
    success: bool | None = None
    tool_error: bool = False

    def __post_init__(self) -> None:
        if self.done != (self.success is not None):
            raise ValueError(
                f"success is set exactly when done; got done={self.done}, success={self.success}"
            )
