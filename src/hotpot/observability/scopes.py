"""Which function or class a line of Python stands in. Pure; knows text and line numbers."""

import ast


def scope_of(text: str, line: int) -> str:
    """Return the dotted name of the innermost function or class around ``line`` (from 1), decorators included.

    Empty at the top of the module, and where the text is no Python.
    """
    try:
        node: ast.AST = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""
    names: list[str] = []
    while (inner := _around(node, line)) is not None:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(inner.name)
        node = inner
    return ".".join(names)


def _around(node: ast.AST, line: int) -> ast.AST | None:
    for child in ast.iter_child_nodes(node):
        begin, end = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
        if begin is None or end is None:
            continue
        first = min([begin, *(one.lineno for one in getattr(child, "decorator_list", ()))])
        if first <= line <= end:
            return child
    return None
