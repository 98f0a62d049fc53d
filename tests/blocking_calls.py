"""Finds calls that can wait for ever, in source text: by the call's name and by what it is given.

A call waits with a deadline where it is given one (``timeout=``, or the argument that is one), where it is told not to wait
(``LOCK_NB``, ``WNOHANG``, ``MSG_DONTWAIT``, ``block=False``), or where the same function bounds it beforehand (``settimeout``, ``poll(s)``) or
expects that it doesn't (``except BlockingIOError``).
What a name stands for is not known here, so that names which mean harmless things elsewhere are told apart by their arguments:
``queue.get()`` waits, ``mapping.get(key)`` does not.
"""

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

WAIT_WITHOUT_ARGUMENTS = frozenset(
    {"join", "get", "wait", "acquire", "result", "exception", "communicate", "select"}
)
"""Methods that wait for ever when they are given nothing."""
NEED_TIMEOUT = frozenset(
    {"urlopen", "create_connection", "communicate", "HTTPConnection", "HTTPSConnection", "SMTP", "FTP"}
)
"""Functions that wait for ever without ``timeout=``, whatever else they are given."""
SUBPROCESS = frozenset({"run", "call", "check_call", "check_output"})
EXECUTORS = frozenset({"ThreadPoolExecutor", "ProcessPoolExecutor", "Pool", "ThreadPool"})
MODULES_OF_WAIT = frozenset({"futures", "connection", "asyncio"})
BOUNDED_BEFORE = {"recv": ("poll", "settimeout"), "recv_bytes": ("poll",), "accept": ("settimeout",)}
"""Calls that wait for ever unless one of these stands in the same function."""
NEVER = frozenset({"pause", "sigwait", "sigwaitinfo", "input"})
HELD_BRIEFLY = frozenset({"join", "result", "recv", "communicate", "sleep", "urlopen", "run", "check_output"})
"""Calls that must not stand inside ``with LOCK``, deadline or not: a lock has none, so that it is held for work only."""


@dataclass(frozen=True, slots=True, order=True)
class Blocking:
    """A call that can wait for ever: in which function, and what it looks like."""

    function: str
    call: str
    line: int


def blocking_calls(source: str) -> list[Blocking]:
    """Return the calls in ``source`` that have no deadline, in order of their lines."""
    tree = ast.parse(source)
    found = []
    for function, body in _functions(tree):
        calls = _calls(body)
        beforehand = {_name(call) for call in calls if call.args}
        if any(
            isinstance(node, ast.ExceptHandler) and _catches(node, "BlockingIOError")
            for node in _within(body)
        ):
            beforehand.add("settimeout")
        found += [
            Blocking(function, ast.unparse(call.func), call.lineno)
            for call in calls
            if _waits_for_ever(call, beforehand)
        ]
    found += [Blocking(function, f"with {name}", line) for function, name, line in _withs(tree)]
    return sorted(found, key=lambda one: one.line)


def _waits_for_ever(call: ast.Call, beforehand: set[str]) -> bool:
    name, owner = _name(call), _owner(call)
    words = {keyword.arg: keyword.value for keyword in call.keywords}
    given = len(call.args)
    if _bounded(words) or (name in {"get", "acquire", "put"} and _is_false(words, call, "block", "blocking")):
        return False
    if name in NEVER and owner in {"", "signal"}:
        return True
    if name in NEED_TIMEOUT:
        return name != "communicate" or given < 2
    if name in SUBPROCESS and owner == "subprocess":
        return True
    if name in BOUNDED_BEFORE:
        return not _mentions(call, "MSG_DONTWAIT") and not beforehand & set(BOUNDED_BEFORE[name])
    if name in {"flock", "lockf"}:
        return not _mentions(call, "LOCK_NB", "LOCK_UN", "F_TLOCK")
    if name in {"waitpid", "wait3", "wait4"}:
        return not _mentions(call, "WNOHANG")
    if name == "connect":
        return owner == "sqlite3" and not _memory(call)
    if name == "select" and owner == "select":
        return given < 4
    if name == "wait" and (owner in MODULES_OF_WAIT or not owner):
        return given < 2
    if name == "shutdown":  # of an executor; a socket's is told how
        return not given and not _is_false(words, call, "wait")
    return name in WAIT_WITHOUT_ARGUMENTS and (not given or (given == 1 and _says_nothing(call.args[0])))


def _withs(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    for function, body in _functions(tree):
        for node in _within(body):
            if not isinstance(node, ast.With):
                continue
            for item in node.items:
                text = ast.unparse(item.context_expr)
                if isinstance(item.context_expr, ast.Call) and _name(item.context_expr) in EXECUTORS:
                    yield function, _name(item.context_expr), node.lineno
                elif text.rpartition(".")[2].strip("_") in {"lock", "guard", "mutex"}:
                    inside = [
                        call
                        for call in _calls(node.body)
                        if _name(call) in HELD_BRIEFLY and not _of_text(call)
                    ]
                    for call in inside:
                        yield function, f"{text}: {ast.unparse(call.func)}", call.lineno


def _functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield each scope with its own statements: the module, classes and functions by qualified name."""
    body: list[ast.stmt] = getattr(tree, "body", [])
    yield outer or "module", body
    for node in _within(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions(node, f"{outer}.{node.name}" if outer else node.name)


def _within(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of a scope; what is defined inside is yielded and not entered (its decorators and defaults are)."""
    waiting = deque[ast.AST](body)
    while waiting:
        node = waiting.popleft()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [*node.decorator_list, *node.args.defaults]
        elif isinstance(node, ast.ClassDef):
            waiting += [*node.decorator_list, *node.bases]
        else:
            waiting += list(ast.iter_child_nodes(node))


def _calls(body: list[ast.stmt]) -> list[ast.Call]:
    return [node for node in _within(body) if isinstance(node, ast.Call)]


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value).rpartition(".")[2] if isinstance(call.func, ast.Attribute) else ""


def _catches(handler: ast.ExceptHandler, name: str) -> bool:
    return handler.type is not None and name in ast.unparse(handler.type)


def _of_text(call: ast.Call) -> bool:
    """Whether it is ``text.join(parts)`` rather than ``thread.join(5)``."""
    told = ast.unparse(call.args[0]) if call.args else ""
    return (
        _name(call) == "join"
        and bool(told)
        and not told.endswith(("_s", "timeout"))
        and not told[0].isdigit()
    )


def _bounded(words: dict[str | None, ast.expr]) -> bool:
    return any(name in words and not _is_none(words[name]) for name in ("timeout", "timeout_s"))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _says_nothing(node: ast.expr) -> bool:
    """Whether it is None or True: no time, or that it shall wait."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is True)


def _is_false(words: dict[str | None, ast.expr], call: ast.Call, *names: str) -> bool:
    values = [words[name] for name in names if name in words] or call.args[:1]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


def _memory(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == ":memory:"


def _mentions(call: ast.Call, *names: str) -> bool:
    text = ", ".join(ast.unparse(argument) for argument in call.args)
    return any(name in text for name in names)
