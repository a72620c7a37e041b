"""From a solution notebook to the exercise: solutions become stubs, hidden tests and outputs go."""

import ast
import copy
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, overload

from labkit.errors import PlanError

__all__ = ["NO_NOTEBOOK", "dump", "strip"]

NotebookT = TypeVar("NotebookT", bound=Mapping[str, Any])

NO_NOTEBOOK = "a notebook is JSON with a list of `cells`"

_MARK = re.compile(r"^(?P<indent>[ \t]*)### (?P<side>BEGIN|END) (?P<kind>SOLUTION|HIDDEN TESTS)[ \t]*$")
# What was meant as a mark and is none would leave a solution in the exercise.
_NEAR_MARK = re.compile(
    r"\b(BEGIN|END)[ _-]*(SOLUTION|HIDDEN[ _-]*TEST)S?\b|(?i:^\s*#+\s*(begin|end) (solution|hidden))"
)
_QUESTION = re.compile(r"^q(\d+)-(\d+)(-|$)")


@overload
def strip(solution: str | os.PathLike[str]) -> str: ...
@overload
def strip(solution: NotebookT) -> NotebookT: ...
def strip(solution: Any) -> Any:
    """Make the exercise of a solution.

    Each `### BEGIN SOLUTION` ... `### END SOLUTION` becomes a line that raises NotImplementedError and says what to
    write; each `### BEGIN HIDDEN TESTS` ... `### END HIDDEN TESTS` goes, and so do outputs and execution counts.

    Args:
        solution: the JSON text of a notebook, the path of one (a `PathLike`, or a text that ends in `.ipynb`), or a
            notebook as a mapping, which is not changed.

    Returns:
        The text of the exercise for a text or path, a new mapping for a mapping.

    Raises:
        PlanError: it is no notebook, or its marks do not fit; cell and line are named.
    """
    if isinstance(solution, Mapping):
        return _strip(copy.deepcopy(solution))
    return dump(_strip(_parse(_text_of(solution))))


def dump(notebook: Mapping[str, Any]) -> str:
    """A notebook as it is stored."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _text_of(solution: Any) -> str:
    is_path = isinstance(solution, os.PathLike) or (isinstance(solution, str) and solution.endswith(".ipynb"))
    if not is_path:
        if not isinstance(solution, str):
            raise PlanError(f"strip got a {type(solution).__name__}: it takes a notebook as text, path or mapping.")
        return solution
    try:
        return pathlib.Path(solution).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlanError(f"{os.fspath(solution)} cannot be read: {error}.") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PlanError(f"this is not JSON ({error}): {NO_NOTEBOOK}.") from None
    except RecursionError:
        raise PlanError(f"this JSON is nested too deeply: {NO_NOTEBOOK}.") from None


def _strip(notebook: Any) -> Any:
    cells = notebook.get("cells") if isinstance(notebook, Mapping) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise PlanError(f"there is no list of cells in it: {NO_NOTEBOOK}.")
    for place, cell in enumerate(cells, start=1):
        source = cell.get("source", "")
        lines = source if isinstance(source, list) else [source]
        if not all(isinstance(line, str) for line in lines):
            raise PlanError(f"the source of cell {_name(cell, place)} is no text: {NO_NOTEBOOK}.")
        text = "".join(lines)
        stripped = "\n".join(_kept(text.split("\n"), cell, place))
        cell["source"] = stripped.splitlines(keepends=True) if isinstance(source, list) else stripped
        if cell.get("cell_type") == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return notebook


def _kept(lines: list[str], cell: Mapping[str, Any], place: int) -> Iterator[str]:
    """The lines of the exercise's cell."""
    opened: re.Match[str] | None = None
    opened_line = 0
    name = _name(cell, place)
    for number, line in enumerate(lines, start=1):
        mark = _MARK.match(line)
        where = f"cell {name}, line {number}"
        if mark is None:
            if _NEAR_MARK.search(line):
                raise PlanError(f"{where}: {line.strip()!r} is no mark: it is `### BEGIN SOLUTION`, alone in its line.")
            if opened is None:
                yield line
            continue
        if cell.get("cell_type") != "code":
            raise PlanError(f"{where}: a mark stands in a {cell.get('cell_type')} cell: only code cells have regions.")
        if mark["side"] == "BEGIN":
            if opened is not None:
                raise PlanError(f"{where}: a region begins in the one of line {opened_line}: regions do not nest.")
            opened, opened_line = mark, number
            if mark["kind"] == "SOLUTION":
                yield mark["indent"] + _stub(lines, number, cell, where)
            continue
        if opened is None or opened["kind"] != mark["kind"]:
            raise PlanError(f"{where}: END {mark['kind']} without BEGIN {mark['kind']}.")
        opened = None
    if opened is not None:
        raise PlanError(f"cell {name}, line {opened_line}: BEGIN {opened['kind']} has no END {opened['kind']}.")


def _stub(lines: list[str], number: int, cell: Mapping[str, Any], where: str) -> str:
    match = _QUESTION.match(str(cell.get("id", "")))
    if match is None:
        raise PlanError(f"{where}: a solution stands in a cell without a question: its id begins like q06-1.")
    question = f"{match[1]}.{match[2]}"
    text = f"Exercise {question} is not solved yet: write {_enclosing(lines, number, where)}, then run its cell again."
    return f"raise NotImplementedError({json.dumps(text, ensure_ascii=False)})"


def _enclosing(lines: list[str], number: int, where: str) -> str:
    """The function that a line stands in, with its classes; "the answer" outside of one."""
    try:
        body: list[ast.stmt] = ast.parse("\n".join(lines)).body
    except (SyntaxError, ValueError) as error:
        raise PlanError(f"{where}: the cell is not Python ({error}).") from None
    names: list[str] = []
    while True:
        around = next((one for one in body if one.lineno <= number <= (one.end_lineno or 0)), None)
        if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
            return ".".join([*names, around.name])
        if not isinstance(around, ast.ClassDef):
            return ".".join(names) or "the answer"
        names.append(around.name)
        body = around.body


def _name(cell: Mapping[str, Any], place: int) -> str:
    return str(cell.get("id", place))
