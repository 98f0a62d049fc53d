import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rollout_parts import SMOL_TEMPLATE, TOOL, chatml_tokenizer, compact_tokenizer

from hotpot.ids import canonical_json
from hotpot.rollout import Dialect
from hotpot.types import Action, Stage, ToolCall, ToolSpec

COMPACT = Dialect(compact_tokenizer())
HERMES = Dialect(chatml_tokenizer(SMOL_TEMPLATE))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "<|end|>",
        "a, b=c",
        'say "x"',
        '"',
        ", x=1",
        "5",
        "null",
        "x)",
        "(",
        "</tool_call>",
        "</think>",
        "1e999",
        "\n",
    ]
)
scalars = (
    texts
    | st.integers(-(10**20), 10**20)
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=3), max_leaves=5
)
keys = st.sampled_from(["text", "count", "x", "_y2"])
calls = st.builds(
    lambda name, arguments: Action(tool_call=ToolCall(name=name, arguments=canonical_json(arguments))),
    st.sampled_from(["echo", "other.tool-2"]),
    st.dictionaries(keys, values, max_size=4),
)


@settings(max_examples=100, deadline=None)
@given(calls, texts, st.booleans())
def test_a_call_reads_as_it_was_written(action: Action, thought: str, with_tools: bool) -> None:
    tools = (TOOL,) if with_tools else ()
    for dialect in (COMPACT, HERMES):
        if dialect is HERMES:
            assume("</think>" not in thought)
        elif with_tools and action.tool_call and action.tool_call.name == "echo":
            # What is declared a string is text as written: a call that breaks its own schema has no spelling.
            assume(isinstance(json.loads(action.tool_call.arguments).get("text", ""), str))
        output = dialect.parse(dialect.encode_action(action, thought, tools), tools)
        assert output.action == action
        assert output.ended
        assert output.spans[-1][0] is Stage.TOOL_CALL


@settings(max_examples=100, deadline=None)
@given(texts, texts)
def test_an_answer_reads_as_it_was_written(answer: str, thought: str) -> None:
    action = Action(answer=answer)
    output = COMPACT.parse(COMPACT.encode_action(action))
    assert output.action == action
    assert output.spans == ((Stage.ANSWER, len(output.tokens)),)
    assume("</think>" not in thought + answer)
    assume("</tool_call>" not in thought + answer)
    output = HERMES.parse(HERMES.encode_action(action, thought))
    assert output.action == action
    assert output.spans[-1][0] is Stage.ANSWER


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_tokens_are_read_and_covered(data: st.DataObject) -> None:
    for dialect in (COMPACT, HERMES):
        likely = [
            *dialect.tokenizer.special_ids.values(),
            *dialect.tokenizer.encode_template("<tool_call>}{").tolist(),
        ]
        index = st.sampled_from(likely) | st.integers(0, dialect.tokenizer.vocab_size - 1)
        tokens = np.array(data.draw(st.lists(index, min_size=1, max_size=20)), dtype=np.int32)
        output = dialect.parse(tokens, (TOOL,))
        assert sum(length for _, length in output.spans) == len(tokens)
        assert all(length > 0 for _, length in output.spans)
        assert {stage for stage, _ in output.spans} <= {Stage.THOUGHT, Stage.TOOL_CALL, Stage.ANSWER}
        assert output.ended == (int(tokens[-1]) in dialect.stop_tokens)
        for part in output.body:
            if not isinstance(part, str):
                assert 0 <= part[0] < part[1] <= len(tokens)


@settings(max_examples=200, deadline=None)
@given(st.text('<>tool_calhink/{}"name:argumets, \n', max_size=60))
def test_any_text_is_read(text: str) -> None:
    for source in (text, f"<tool_call>{text}</tool_call>", f"<think>{text}</think>{text}"):
        tokens = np.append(HERMES.tokenizer.encode_template(source), HERMES.end_token).astype(np.int32)
        assert sum(length for _, length in HERMES.parse(tokens).spans) == len(tokens)


def compact(text: str) -> Action:
    tokens = COMPACT.tokenizer.encode_template(text + "<|end|>")
    return COMPACT.parse(tokens, (TOOL,)).action


def hermes(text: str) -> Action:
    return HERMES.parse(HERMES.tokenizer.encode_template(text + "<|im_end|>"), (TOOL,)).action


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("echo(text=Ada)", {"text": "Ada"}),
        ("echo(text=(3+4)*2, or 5)", {"text": "(3+4)*2, or 5"}),
        ("echo(text=5, count=5)", {"text": "5", "count": 5}),
        ("echo(count=five)", {"count": "five"}),
        ('echo(text="5")', {"text": "5"}),
        ("echo(text=)", {"text": ""}),
        ("echo()", {}),
        (" echo(text= a )\n", {"text": " a "}),
        ("echo(count=1e999)", None),
        ("echo(count=NaN)", {"count": "NaN"}),
    ],
)
def test_compact_calls(text: str, arguments: dict[str, object] | None) -> None:
    action = compact(f"hm<|call|>{text}")
    if arguments is None:
        assert action.malformed
    else:
        assert action.tool_call == ToolCall(name="echo", arguments=canonical_json(arguments))


NOTE = ToolSpec(
    name="note",
    description="note something",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {
                "text": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
                "either": {"type": ["null", "string"]},
                "one": {"oneOf": [{"type": "string"}]},
                "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "mixed": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "free": {"anyOf": [{"type": "string"}, {}]},
            },
        }
    ),
)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("text=5, either=true, one=7", {"text": "5", "either": "true", "one": "7"}),
        ("text=null, either=null, one=null", {"text": None, "either": None, "one": "null"}),
        ('text="null"', {"text": "null"}),
        ("count=5", {"count": 5}),
        ("count=null", {"count": None}),
        ("mixed=5, free=5", {"mixed": 5, "free": 5}),
    ],
)
def test_a_parameter_that_may_be_null_is_read_as_what_else_it_is(
    text: str, arguments: dict[str, object]
) -> None:
    tokens = COMPACT.tokenizer.encode_template(f"<|call|>note({text})<|end|>")
    action = Action(tool_call=ToolCall(name="note", arguments=canonical_json(arguments)))
    assert COMPACT.parse(tokens, (NOTE,)).action == action
    assert COMPACT.parse(COMPACT.encode_action(action, tools=(NOTE,)), (NOTE,)).action == action


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|call|>", "a call is"),
        ("<|call|>echo", "a call is"),
        ("<|call|>echo(text=a", "a call is"),
        ("<|call|>echo(a)", "key=value"),
        ("<|call|>(text=a)", "tool name"),
        ("<|call|>é(text=a)", "tool name"),
        ("<|call|>echo(text=a, text=b)", "twice"),
        ("<|call|>echo(text=a)<|call|>echo(text=b)", "more than one"),
        ("a<|user|>b", "special token <|user|>"),
        ("<|call|>echo(text=<|tool|>)", "special token <|tool|>"),
        ("a<|end|>b", "special token <|end|>"),
    ],
)
def test_malformed_compact_output_says_why(text: str, reason: str) -> None:
    assert reason in (compact(text).malformed or "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>", "without"),
        ("<tool_call>{}</tool_call>", "a call is"),
        ('<tool_call>{"name":"f"}</tool_call>', "arguments"),
        ('<tool_call>{"name":"f","arguments":"{}"}</tool_call>', "arguments"),
        ('<tool_call>{"name":"f g","arguments":{}}</tool_call>', "tool name"),
        ('<tool_call>{"name":"f","arguments":{"a":1,"a":2}}</tool_call>', "twice"),
        ('<tool_call>{"name":"f","arguments":{"a":NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name":"f","arguments":{"a":1e999}}</tool_call>', "no json"),
        ('<tool_call>{"name":"f","arguments":{"a":"\\ud800"}}</tool_call>', "no json"),
        ("<tool_call>" + "[" * 30000 + "</tool_call>", "json"),
        ("<tool_call>not json</tool_call>", "json"),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call> more', "after the call"),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>', "more than one"),
        ("<think>never ends", "without"),
        ("an answer</tool_call>", "without"),
        ("a<|im_start|>b", "special token"),
    ],
)
def test_malformed_hermes_output_says_why(text: str, reason: str) -> None:
    assert reason in (hermes(text).malformed or "")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("42", Action(answer="42")),
        ("<think>hm</think>42", Action(answer="42")),
        ("hm</think>\n\n42", Action(answer="42")),
        ("<think></think>", Action(answer="")),
        (
            'so <tool_call>{"name":"f","arguments":{}}</tool_call>\n',
            Action(tool_call=ToolCall(name="f", arguments="{}")),
        ),
    ],
)
def test_hermes_output(text: str, action: Action) -> None:
    assert hermes(text) == action


def test_output_without_an_end_token_is_cut_off() -> None:
    output = COMPACT.parse(COMPACT.tokenizer.encode_text("42"))
    assert output.action.malformed == "cut off before its end"
    assert not output.ended


def test_spans_are_cut_where_tokens_begin() -> None:
    text = HERMES.tokenizer.encode_template
    parts = [
        text("<think>\né hm\n"),
        text("</think>"),
        text("\n\n<tool_call>"),
        text('{"name": "f", "arguments": {}}</tool_call>'),
    ]
    tokens = np.concatenate([*parts, [HERMES.end_token]]).astype(np.int32)
    spans = HERMES.parse(tokens).spans
    newlines = len(text("\n\n"))
    thought = len(parts[0]) + len(parts[1]) + newlines
    assert spans == ((Stage.THOUGHT, thought), (Stage.TOOL_CALL, len(tokens) - thought))


def test_characters_spread_over_tokens_are_read_whole() -> None:
    tokens = HERMES.encode_action(Action(answer="日本語 – ok"))
    assert HERMES.parse(tokens).action.answer == "日本語 – ok"
    assert len(tokens) > len("日本語 – ok")


@pytest.mark.parametrize("dialect", [COMPACT, HERMES], ids=["compact", "hermes"])
def test_what_has_no_spelling_is_refused(dialect: Dialect) -> None:
    with pytest.raises(ValueError, match=r"malformed|no words"):
        dialect.encode_action(Action(malformed="x"))
    with pytest.raises(ValueError, match="no spelling"):
        dialect.encode_action(Action(tool_call=ToolCall(name="f g", arguments="{}")))
    with pytest.raises(ValueError, match=r"no spelling|no words"):
        dialect.encode_action(Action(answer="<tool_call>"), "" if dialect is HERMES else "thought")


def test_arguments_that_are_no_identifiers_have_no_compact_spelling() -> None:
    action = Action(tool_call=ToolCall(name="f", arguments=json.dumps({"a b": 1})))
    with pytest.raises(ValueError, match="no spelling"):
        COMPACT.encode_action(action)
