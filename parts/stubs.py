"""Turns a finished function into an exercise: its docstring stays, its body becomes a `NotImplementedError`.

Promises that all text outside the body survives as it was, comments and formatting included, because only the
lines between two `ast` positions change. Knows nothing of parts: it is given source, names and messages.
"""

import ast
import json
import re
import textwrap
from pathlib import Path

from parts.manifest import SeriesError

LINE_LENGTH = 110


def stub(source: str, messages: dict[str, str], path: str) -> str:
    """`source` without the bodies of the functions in `messages` (`Class.method` or `function` -> message).

    Raises SeriesError, naming `path`, when one is not there or has no body to cut out.
    """
    lines = source.splitlines(keepends=True)
    found = [(find_function(source, name, path), message) for name, message in messages.items()]
    # From the bottom up, so that the line numbers above a cut stay true.
    for node, message in sorted(found, key=lambda pair: -pair[0].lineno):
        first = node.body[0]
        cut_from = first.end_lineno if ast.get_docstring(node) is not None else first.lineno - 1
        lines[cut_from : node.end_lineno] = _raise(message, " " * first.col_offset)
    return "".join(lines)


def is_stub(source: str, name: str, path: str) -> bool:
    """Whether the function still is the `raise NotImplementedError` that `stub` left."""
    match find_function(source, name, path).body[-1]:
        case ast.Raise(exc=ast.Call(func=ast.Name("NotImplementedError"), args=[ast.Constant(str(message))])):
            return re.match(r"(Part \d+|Extension [A-Z]): ", message) is not None
    return False


def is_written(root: Path, path: str, name: str) -> bool:
    """Whether the function in the file `path` of the tree is no longer as `stub` left it.

    A file that is gone, is no Python or lacks the function for now counts as written: it is not as it was.
    """
    try:
        return not is_stub((root / path).read_text(encoding="utf-8"), name, path)
    except (SeriesError, SyntaxError, OSError):
        return True


def find_function(source: str, name: str, path: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The function or method `name`, which has a body on its own lines; else SeriesError."""
    node: ast.AST = ast.parse(source, filename=path)
    for step in name.split("."):
        inside = [child for child in getattr(node, "body", ()) if getattr(child, "name", None) == step]
        if not inside:
            raise SeriesError(f"{path}: no {step!r} for the exercise {name!r}")
        node = inside[-1]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise SeriesError(f"{path}: the exercise {name!r} is not a function or method")
    first = node.body[0]
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body or first.lineno == node.lineno or getattr(first, "decorator_list", None):
        raise SeriesError(f"{path}: the exercise {name!r} has no body of its own lines to cut out")
    return node


def _raise(message: str, indent: str) -> list[str]:
    line = f"{indent}raise NotImplementedError({json.dumps(message, ensure_ascii=False)})\n"
    if len(line) <= LINE_LENGTH + 1:
        return [line]
    # drop_whitespace=False leaves the spaces in the pieces, so that they join to the message as it was.
    pieces = textwrap.wrap(message, LINE_LENGTH - len(indent) - 8, drop_whitespace=False)
    quoted = [f"{indent}    {json.dumps(piece, ensure_ascii=False)}\n" for piece in pieces]
    return [f"{indent}raise NotImplementedError(\n", *quoted, f"{indent})\n"]
