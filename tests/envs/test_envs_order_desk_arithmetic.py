import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotpot.envs.order_desk.arithmetic import MAX_CHARS, MAX_RESULT, evaluate
from hotpot.errors import ToolError

NUMBERS = st.integers(0, 999).map(lambda n: (str(n), n))


def _combine(
    pair: tuple[tuple[str, int], str, tuple[str, int], bool],
) -> tuple[str, int]:
    (left, a), sign, (right, b), spaced = pair
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    text = f"({left}) {sign} ({right})" if spaced else f"({left}{sign}({right}))"
    if not spaced and sign == "*":
        text = f"(({left})*({right}))"
    return text, value


EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner, st.booleans()).map(_combine),
    max_leaves=6,
)


def outcome(text: str) -> tuple[int | None, str]:
    """Return the value, or the reason of the refusal."""
    try:
        return evaluate(text), ""
    except ToolError as error:
        return None, str(error)


@given(EXPRESSIONS)
def test_agrees_with_the_tree_it_was_written_from(case: tuple[str, int]) -> None:
    text, value = case
    if len(text) > MAX_CHARS:
        assert outcome(text) == (None, "expression too long")
    else:
        assert outcome(text) in ((value, ""), (None, "result too large"))
    if len(text) <= MAX_CHARS and text.count("*") < 3:
        assert outcome(text) == (value, "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3*17", 51),
        ("3+17", 20),
        ("3*17+2*5", 61),
        ("2*(3+4)-1", 13),
        ("-3*-2", 6),
        ("007", 7),
        (" 1 + 2 ", 3),
        ("10-3-2", 5),
    ],
)
def test_precedence_and_order(text: str, value: int) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unexpected end"),
        ("3*", "unexpected end"),
        ("3 4", "unexpected 4"),
        ("(3", "missing )"),
        ("3)", "unexpected )"),
        ("()", "unexpected )"),
        ("3**4", "unexpected *"),
        ("3/4", "takes digits"),
        ("a", "takes digits"),
        ("٣", "takes digits"),
        ("__import__('os')", "takes digits"),
        ("1" * 10, "number too long"),
        ("1" * 65, "expression too long"),
        ("999999999*999999999", "result too large"),
    ],
)
def test_everything_else_is_refused_briefly(text: str, reason: str) -> None:
    with pytest.raises(ToolError, match=re.escape(reason)):
        evaluate(text)


@given(st.text() | st.text(alphabet="0123456789+-*() ", max_size=80))
def test_any_text_gives_a_bounded_number_or_a_short_refusal(text: str) -> None:
    value, reason = outcome(text)
    assert value is None or abs(value) <= MAX_RESULT
    assert (value is None) == bool(reason)
    assert len(reason) < 40
