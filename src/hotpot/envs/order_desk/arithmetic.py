"""Integer arithmetic for the calculator tool: ``+``, ``-``, ``*`` and parentheses, with bounds, and no ``eval``.

Grammar::

    sum     = product (("+" | "-") product)*
    product = factor ("*" factor)*
    factor  = digits | "(" sum ")" | "-" factor
"""

from hotpot.errors import ToolError

MAX_CHARS = 64
"""Longest expression."""
MAX_DIGITS = 9
"""Longest number in an expression."""
MAX_RESULT = 10**12
"""Largest magnitude of any intermediate result."""

_DIGITS = frozenset("0123456789")
_SIGNS = frozenset("+-*()")


def evaluate(expression: str) -> int:
    """Return the value of an expression. Raises ToolError with a short reason for everything it does not read."""
    if len(expression) > MAX_CHARS:
        raise ToolError("expression too long")
    reader = _Reader(_tokens(expression))
    value = reader.sum()
    if reader.peek():
        raise ToolError(f"unexpected {reader.peek()}")
    return value


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    in_number = False
    for sign in expression:
        if sign in _DIGITS and in_number:
            tokens[-1] += sign
        elif sign in _DIGITS or sign in _SIGNS:
            tokens.append(sign)
        elif sign != " ":
            raise ToolError("expression takes digits + - * ( )")
        in_number = sign in _DIGITS
    return tokens


class _Reader:
    """A recursive descent over the tokens; depth is bounded by the length of the expression."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0

    def peek(self) -> str:
        """Return the next token, or "" at the end."""
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def sum(self) -> int:
        """Read a sum."""
        value = self._product()
        while self.peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = _bounded(value + sign * self._product())
        return value

    def _product(self) -> int:
        value = self._factor()
        while self.peek() == "*":
            self._take()
            value = _bounded(value * self._factor())
        return value

    def _factor(self) -> int:
        token = self._take()
        if token == "-":
            return -self._factor()
        if token == "(":
            value = self.sum()
            if self._take() != ")":
                raise ToolError("missing )")
            return value
        if not token or token in _SIGNS:
            raise ToolError(f"unexpected {token or 'end'}")
        if len(token) > MAX_DIGITS:
            raise ToolError("number too long")
        return int(token)

    def _take(self) -> str:
        token = self.peek()
        self._next += 1
        return token


def _bounded(value: int) -> int:
    if abs(value) > MAX_RESULT:
        raise ToolError("result too large")
    return value
