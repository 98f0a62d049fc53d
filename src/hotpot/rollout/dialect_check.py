"""The check of a dialect at start: a probe conversation, rendered at once and step by step.

The probe has an answer and several tool results, no tools and then some, and content that spells every added token,
special or not (``<tool_call>`` is often none).
"""

import numpy as np

from hotpot.errors import ModelFilesError
from hotpot.rollout.dialect import Dialect
from hotpot.rollout.prompt import Rewrite
from hotpot.rollout.template import Shape
from hotpot.types import Message, Role, ToolSpec

_TOOL = ToolSpec(
    name="look_up",
    description="look a key up",
    parameters='{"properties":{"key":{"description":"the key","type":"string"}},"type":"object"}',
)


def check_dialect(dialect: Dialect) -> bool:
    """Try the template on a probe conversation; return whether it only ever appends.

    Raises :class:`ModelFilesError` where it loses a message of some role, where content becomes an added token, or
    where the conversation rendered at once and step by step differ by a token although it only appends. A template that rewrites history is usable:
    each rewrite starts a segment.
    """
    added = "".join(dialect.tokenizer.added_ids)
    opening = (
        Message(role=Role.SYSTEM, content=f"be brief {added}"),
        Message(role=Role.USER, content=f"what is k? {added}"),
    )
    rounds = (
        (Message(role=Role.TOOL, content=f"v {added}", name="look_up"),),
        (Message(role=Role.TOOL, content="w", name="look_up"), Message(role=Role.TOOL, content="x")),
        (Message(role=Role.USER, content="and l?"),),
    )
    _check_roles(dialect)
    appends = [_check_probe(dialect, opening, rounds, tools) for tools in ((), (_TOOL,))]
    return all(appends)


def _check_roles(dialect: Dialect) -> None:
    """Check that the content of each role shows exactly once."""
    roles = (Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.USER)
    shapes = tuple(Shape(role=role, body=(None,)) for role in roles)
    for tools in ((), (_TOOL,)):
        rendered = dialect.template.render(shapes, tools, generation_prompt=True)
        for role, content in zip(roles, rendered.contents, strict=True):
            times = sum(
                rendered.slot(character) == (rendered.slot(content)[0], level)
                for character in rendered.text
                if character >= "\U000f0000"
                for level in range(3)
            )
            if times != 1:
                raise ModelFilesError(
                    f"the chat template shows the content of a {role} message {times} times instead of once; "
                    "use a template with system, user, assistant and tool messages"
                )


def _check_probe(
    dialect: Dialect,
    opening: tuple[Message, ...],
    rounds: tuple[tuple[Message, ...], ...],
    tools: tuple[ToolSpec, ...],
) -> bool:
    """Return whether the template appended in every round; raise where whole and step by step differ all the same."""
    added = [*dialect.tokenizer.added_ids.values()]
    conversation, prompt = dialect.open(opening, tools)
    tokens, messages = [prompt.tokens], list(opening)
    for number, new in enumerate(rounds):
        answer = dialect.tokenizer.encode_text(f"answer {number}")
        output = dialect.parse(np.append(answer, np.int32(dialect.end_token)), tools)
        prompt = conversation.extend(output, new)
        messages += [Message(role=Role.ASSISTANT, content=f"answer {number}"), *new]
        if isinstance(prompt, Rewrite):
            return False
        tokens += [output.tokens, prompt.tokens]
    whole = dialect.open(messages, tools)[1].tokens
    step_by_step = np.concatenate(tokens)
    if not np.array_equal(whole, step_by_step):
        raise ModelFilesError(
            f"the chat template gives {len(whole)} tokens at once and {len(step_by_step)} step by step, or others, "
            f"for the same conversation; at once: {dialect.tokenizer.decode(whole)!r}, step by step: "
            f"{dialect.tokenizer.decode(step_by_step)!r}; use a template that only appends"
        )
    harmless = [Message(role=message.role, content="a", name=message.name) for message in messages]
    expected = int(np.isin(dialect.open(harmless, tools)[1].tokens, added).sum())
    found = int(np.isin(whole, added).sum())
    if found != expected:
        raise ModelFilesError(
            f"text that spells added tokens becomes {found - expected} of them; text from outside must never become a "
            "control token: use a tokenizer.json whose vocabulary keeps them apart"
        )
    return True
