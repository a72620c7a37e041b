"""The top-level statements of a cell: which names each binds, and which it needs. Nothing is run."""

import ast
import dis
import re
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Statement", "statements_of"]

# Such a cell is read again for every command in it.
MAX_COMMAND_CHARS = 20_000
MAX_COMMANDS = 50
# `%matplotlib inline`, `!ls`, `?f`, `f?`, `x = !ls`, `x = %time f()`
_COMMAND = re.compile(r"^\s*[%!?]|\?\s*$|=\s*[%!]")
# A cell under one of these is Python that runs here; under any other (%%px, %%bash) it is not.
_HERE = re.compile(r"^\s*%%(time|capture|prun)\b[^\n]*")
_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Statement:
    """A top-level statement.

    Attributes:
        first: its first line in the cell (of its first decorator, where it has one).  last: its last.
        binds: names of the notebook that it binds or changes.
        binds_all: whether it is `from ... import *`.
        calls_on: the name whose method it calls and does nothing else, as `SIZES.append(2)` does; "" for others.
        is_import: whether it imports.
        is_future: whether it is `from __future__ import ...`, which counts for all that follows.
        needs: names of the notebook that it needs, at once or when its functions are called.
        needs_now: those that it needs at once.
        is_stub: whether it defines a function, or a class with one, that has the stub's NotImplementedError.
        raises: whether it is a bare `raise`.
    """

    first: int
    last: int
    binds: frozenset[str]
    binds_all: bool
    calls_on: str
    is_import: bool
    is_future: bool
    needs: frozenset[str]
    needs_now: frozenset[str]
    is_stub: bool
    raises: bool


def statements_of(source: str) -> tuple[list[Statement] | None, str]:
    """The statements of a cell, and its text as they count lines in it.

    Returns:
        None in place of statements when the cell is no Python; none for a cell that runs elsewhere, such as under
        `%%px`. The text is the cell's own, without IPython's commands where it has any.
    """
    body = source.lstrip()
    if body.startswith("%%"):
        match = _HERE.match(source)
        if match is None:
            return [], source
        source = "\n" * match[0].count("\n") + source[match.end() :]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _parsed(source)
        if found is None and len(source) <= MAX_COMMAND_CHARS and (text := _without_commands(source)) != source:
            found = _parsed(text)
            return found, source if found is None else text
    return found, source


def _parsed(source: str) -> list[Statement] | None:
    try:
        return list(_statements(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _statements(tree: ast.Module) -> Iterator[Statement]:
    for node in tree.body:
        code = compile(ast.Module([node], []), "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        now = set(_names(code, _LOADS, deep=False))
        own = set(_names(code, {"STORE_NAME", "STORE_GLOBAL"}, deep=False))
        own |= set(_names(code, {"STORE_GLOBAL"}, deep=True)) | set(_changed(node))
        decorators = getattr(node, "decorator_list", [])
        yield Statement(
            first=min([node.lineno, *(one.lineno for one in decorators)]),
            last=node.end_lineno or node.lineno,
            binds=frozenset(own),
            binds_all=isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names),
            calls_on=_calls_on(node),
            is_import=isinstance(node, ast.Import | ast.ImportFrom),
            is_future=isinstance(node, ast.ImportFrom) and node.module == "__future__",
            needs=frozenset(_names(code, _LOADS, deep=True)),
            needs_now=frozenset(now),
            is_stub=_is_stub(node),
            raises=isinstance(node, ast.Raise),
        )


def _names(code: types.CodeType, operations: set[str] | frozenset[str], *, deep: bool) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname in operations and isinstance(one.argval, str):
            yield one.argval
    for inner in code.co_consts if deep else ():
        if isinstance(inner, types.CodeType):
            yield from _names(inner, operations, deep=True)


def _changed(node: ast.stmt) -> Iterator[str]:
    """Names whose objects an assignment changes: `CACHE["x"] = 1`, `f.limit = 2`."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
            if isinstance(target, ast.Name):
                yield target.id


def _calls_on(node: ast.stmt) -> str:
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    owner = called.value if isinstance(called, ast.Attribute) else None
    return owner.id if isinstance(owner, ast.Name) else ""


def _is_stub(node: ast.stmt) -> bool:
    """Whether a function, or a method of a class, still has the line that `strip` leaves."""
    if isinstance(node, ast.ClassDef):
        return any(_is_stub(one) for one in node.body)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    for one in node.body:
        raised = one.exc if isinstance(one, ast.Raise) else None
        named = raised.func if isinstance(raised, ast.Call) else raised
        if isinstance(named, ast.Name) and named.id == "NotImplementedError":
            return True
    return False


def _without_commands(source: str) -> str:
    """The cell with `pass` where IPython's commands stood, line for line: wherever Python stops at one of them."""
    lines = source.split("\n")
    for _ in range(MAX_COMMANDS):
        try:
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            if not 0 <= at < len(lines) or not _COMMAND.search(lines[at]):
                break
            lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + "pass"
        except (ValueError, RecursionError, MemoryError):
            break
        else:
            break
    return "\n".join(lines)
