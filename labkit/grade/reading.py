"""Reads a notebook that somebody handed in: whatever the file holds, it ends with code cells or with a reason."""

import json
import os
import pathlib
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.errors import LabError

__all__ = ["CodeCell", "Unreadable", "read_cells", "shown"]

MAX_NOTEBOOK_BYTES = 20 << 20
MAX_CELLS = 2_000
MAX_CELL_CHARS = 100_000
MIB = 1 << 20


class Unreadable(LabError):
    """A notebook that cannot be read; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCell:
    """A code cell of a notebook.

    Attributes:
        name: what tracebacks call it, such as "06_ring_and_tree.ipynb, cell 5".
        number: which of the notebook's code cells it is, from 1 on.
        ids: its own id and the one that nbgrader gave it, as far as they are there.
        source: its text.
    """

    name: str
    number: int
    ids: frozenset[str]
    source: str


def read_cells(path: pathlib.Path, *, max_bytes: int = MAX_NOTEBOOK_BYTES) -> tuple[CodeCell, ...]:
    """Read the code cells of a notebook of format 4, or of format 3.

    Cells are counted as a person would who counts code cells only. One whose source is no text counts and is left out.

    Raises:
        Unreadable: it is no notebook, or nothing that should be opened.
    """
    return tuple(_code_cells(_cells(_parse(_read(path, max_bytes))), shown(path.name)))


def shown(name: str, *, most: int = 200) -> str:
    r"""A name as one line that every file and terminal can take.

    >>> shown("a\nb\u202ec")
    'a\\nb\\u202ec'
    """
    clean = "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in name)
    return clean if len(clean) <= most else f"{clean[: most - 3]}..."


def _read(path: pathlib.Path, max_bytes: int) -> bytes:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode) and not path.is_symlink():  # opening a device may do something
            raise Unreadable("it is no regular file.")
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Unreadable("it is no regular file.")
            content = file.read(max_bytes + 1)
    except OSError as error:
        why = "it is a link, and links are not followed" if path.is_symlink() else f"{error.strerror}"
        raise Unreadable(f"{why}.") from None
    if len(content) > max_bytes:
        raise Unreadable(f"it is larger than {max_bytes / MIB:g} MiB: a notebook without outputs is far smaller.")
    return content


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Unreadable("it is not UTF-8 text.") from None
    except ValueError as error:
        raise Unreadable(f"it is not JSON ({shown(str(error))}).") from None
    except RecursionError:
        raise Unreadable("its JSON is nested too deeply.") from None


def _cells(notebook: Any) -> list[Any]:
    cells = notebook.get("cells") if isinstance(notebook, Mapping) else None
    if cells is None and isinstance(notebook, Mapping) and isinstance(notebook.get("worksheets"), list):
        sheets = [one for one in notebook["worksheets"] if isinstance(one, Mapping)]
        cells = [cell for sheet in sheets if isinstance(sheet.get("cells"), list) for cell in sheet["cells"]]
    if not isinstance(cells, list):
        raise Unreadable("it is JSON and no notebook: it has no list of cells.")
    if len(cells) > MAX_CELLS:
        raise Unreadable(f"it has {len(cells)} cells: at most {MAX_CELLS} are read.")
    return cells


def _code_cells(cells: Iterable[Any], file: str) -> Iterable[CodeCell]:
    number = 0
    for cell in cells:
        if not isinstance(cell, Mapping) or cell.get("cell_type") != "code":
            continue
        number += 1
        source = _source(cell.get("source", cell.get("input", "")))
        if source is not None:
            yield CodeCell(name=f"{file}, cell {number}", number=number, ids=_ids(cell), source=source)


def _source(value: Any) -> str | None:
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        return None
    text = "".join(lines)
    if len(text) > MAX_CELL_CHARS:
        return None
    # Half a surrogate pair is valid JSON and no text that Python compiles.
    return text.encode("utf-8", "replace").decode("utf-8")


def _ids(cell: Mapping[str, Any]) -> frozenset[str]:
    metadata = cell.get("metadata")
    marks = metadata.get("nbgrader") if isinstance(metadata, Mapping) else None
    found = (cell.get("id"), marks.get("grade_id") if isinstance(marks, Mapping) else None)
    return frozenset(one for one in found if isinstance(one, str))
