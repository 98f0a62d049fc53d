import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotpot.envs.tools import Toolbox, ToolReply, clip, define_tool
from hotpot.errors import EnvironmentFailure, EnvironmentSpecError, ToolError
from hotpot.types import ToolCall

SEEN: list[dict[str, Any]] = []


def everything(
    text: str,
    count: int,
    share: float,
    flag: bool,
    unit: Literal["box", "bag"],
    sizes: list[int],
    note: str | None = None,
    again: int = 1,
) -> str:
    """take one of each

    text: some words
    sizes: the sizes, in order
    """
    return json.dumps([text, count, share, flag, unit, sizes, note, again])


def refuse() -> str:
    """refuse"""
    raise ToolError("no")


def break_down() -> str:
    """break"""
    raise RuntimeError("wires crossed")


class Shop:
    """Holds state that a tool method reads."""

    def __init__(self, price: int) -> None:
        self.price = price

    def price_of(self, item: str) -> str:
        """read a price"""
        return f"{item} {self.price}"


BOX = Toolbox(everything, refuse, break_down, Shop.price_of)
GOOD: dict[str, Any] = {
    "text": "hi",
    "count": 3,
    "share": 0.5,
    "flag": True,
    "unit": "box",
    "sizes": [1, 2],
}


def run(name: str, arguments: Any, on: object = None) -> ToolReply:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return BOX.run(ToolCall(name=name, arguments=text), on=on)


def test_schema_is_derived_from_signature_and_docstring() -> None:
    spec = BOX.specs[0]
    assert (spec.name, spec.description) == ("everything", "take one of each")
    assert json.loads(spec.parameters) == {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "some words"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "flag": {"type": "boolean"},
            "unit": {"type": "string", "enum": ["box", "bag"]},
            "sizes": {"type": "array", "items": {"type": "integer"}, "description": "the sizes, in order"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "again": {"type": "integer", "default": 1},
        },
        "required": ["text", "count", "share", "flag", "unit", "sizes"],
        "additionalProperties": False,
    }


def test_values_arrive_as_json_or_as_text() -> None:
    expected = json.dumps(["hi", 3, 0.5, True, "box", [1, 2], None, 1])
    assert run("everything", GOOD) == ToolReply(text=expected)
    as_text = {"text": "hi", "count": "3", "share": "0.5", "flag": "true", "unit": "box", "sizes": "[1, 2]"}
    assert run("everything", as_text | {"note": "null", "again": "1"}) == ToolReply(text=expected)
    assert json.loads(
        run("everything", GOOD | {"text": 4821, "count": 3.0, "share": 2, "note": "n"}).text
    ) == [
        "4821",
        3,
        2.0,
        True,
        "box",
        [1, 2],
        "n",
        1,
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"text": None}, "text must be text"),
        ({"text": True}, "text must be text"),
        ({"text": ["a"]}, "text must be text"),
        ({"text": "\ud800"}, "text must be text"),
        ({"count": "three"}, "count must be a whole number"),
        ({"count": "3.5"}, "count must be a whole number"),
        ({"count": "٣"}, "count must be a whole number"),
        ({"count": 3.5}, "count must be a whole number"),
        ({"count": True}, "count must be a whole number"),
        ({"count": 10**18}, "count must be a whole number"),
        ({"count": "1" * 19}, "count must be a whole number"),
        ({"count": {}}, "count must be a whole number"),
        ({"share": "x"}, "share must be a number"),
        ({"share": "nan"}, "share must be a number"),
        ({"share": "1e999"}, "share must be a number"),
        ({"share": 10**400}, "share must be a number"),
        ({"flag": 1}, "flag must be true or false"),
        ({"flag": "yes"}, "flag must be true or false"),
        ({"unit": "crate"}, "unit must be one of box bag"),
        ({"unit": ["box"]}, "unit must be one of box bag"),
        ({"sizes": 1}, "sizes must be a list"),
        ({"sizes": "1,2"}, "sizes must be a list"),
        ({"sizes": [1, "b"]}, "sizes must be a whole number"),
        ({"extra": 1}, "everything takes no extra"),
    ],
)
def test_ill_typed_arguments_are_answered(change: dict[str, Any], reason: str) -> None:
    assert run("everything", GOOD | change) == ToolReply(text=f"error: {reason}", error=True)


def test_wrong_calls_are_answered() -> None:
    assert run("nothing", {}) == ToolReply(text="error: no tool nothing", error=True)
    missing = {key: GOOD[key] for key in ("text", "share", "flag", "unit")}
    assert run("everything", missing) == ToolReply(text="error: everything needs count sizes", error=True)
    for text in ("", "{", "[]", "3", "null", "[" * 4000, '{"a": ' * 600, '{"count": ' + "9" * 5000 + "}"):
        assert run("everything", text).error
    assert run("everything", '{"text": "a", "text": "b"}').text == "error: text is given twice"
    assert run("refuse", {}) == ToolReply(text="error: no", error=True)


def test_a_broken_tool_is_a_broken_environment() -> None:
    with pytest.raises(EnvironmentFailure, match="tool break_down broke: RuntimeError: wires crossed"):
        run("break_down", {})


def test_a_method_acts_on_the_object_it_is_given() -> None:
    assert run("price_of", {"item": "bolt"}, on=Shop(17)).text == "bolt 17"
    assert run("price_of", {"item": "bolt"}, on=Shop(18)).text == "bolt 18"
    assert "self" not in BOX.specs[3].parameters


@given(name=st.sampled_from(["everything", "refuse", "price_of"]) | st.text(), arguments=st.text())
def test_no_text_makes_a_call_raise(name: str, arguments: str) -> None:
    if name != "break_down":
        reply = run(name, arguments, on=Shop(1))
        assert reply.error or name in ("refuse", "price_of")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(change=st.dictionaries(st.sampled_from([*GOOD, "note", "again", "x"]), VALUES))
def test_no_value_makes_a_call_raise_or_arrive_ill_typed(change: dict[str, Any]) -> None:
    reply = run("everything", GOOD | change)
    if not reply.error:
        text, count, share, flag, unit, sizes, note, again = json.loads(reply.text)
        assert [type(v) for v in (text, count, share, flag)] == [str, int, float, bool]
        assert unit in ("box", "bag")
        assert all(type(size) is int for size in sizes)
        assert note is None or type(note) is str
        assert type(again) is int
    assert "\n" not in reply.text


def no_docstring(x: int) -> str:
    return str(x)


def no_annotation(x) -> str:  # type: ignore[no-untyped-def]
    """do"""
    return str(x)


def no_return(x: int):  # type: ignore[no-untyped-def]
    """do"""


def returns_number(x: int) -> int:
    """do"""
    return x


def takes_dict(x: dict[str, int]) -> str:
    """do"""
    return str(x)


def takes_union(x: int | str) -> str:
    """do"""
    return str(x)


def takes_numbers(x: Literal[1, 2]) -> str:
    """do"""
    return str(x)


def takes_any_number_of(*x: int) -> str:
    """do"""
    return str(x)


def has_odd_default(x: float = float("nan")) -> str:
    """do"""
    return str(x)


def unresolved(x: "NoSuchType") -> str:  # type: ignore[name-defined]  # noqa: F821
    """do"""
    return str(x)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (no_docstring, "has no docstring"),
        (no_annotation, "has no annotation"),
        (no_return, "return str"),
        (returns_number, "return str"),
        (takes_dict, "no JSON schema"),
        (takes_union, "no JSON schema"),
        (takes_numbers, "no JSON schema"),
        (takes_any_number_of, "plain named parameter"),
        (has_odd_default, "no plain JSON"),
        (unresolved, "can't be resolved"),
    ],
)
def test_what_can_not_be_a_tool_is_refused_at_definition(function: Callable[..., str], reason: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=reason):
        define_tool(function)


def test_names_of_tools_are_distinct() -> None:
    with pytest.raises(EnvironmentSpecError, match="repeat"):
        Toolbox(refuse, refuse)


def test_clip_is_one_short_printable_line() -> None:
    assert clip("Adx") == "Adx"
    assert clip("a\n b\x00\u202ec") == "a b c"
    assert clip("x" * 100) == "x" * 21 + "..."
    assert len(clip("x" * 100, 7)) == 7
