"""Makes the frames of a rank readable in the notebook: cells by their names, lines that only the notebook knows."""

import linecache
import re
from dataclasses import replace

from IPython.core.getipython import get_ipython

from labkit.errors import Failure

_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in [^\n]*\n(?!    )', re.MULTILINE)
_FILE = re.compile(r'^  File "(?P<file>[^"\n]+)"', re.MULTILINE)


def readable(failure: Failure) -> Failure:
    """The same failure, with the source of the notebook's cells filled in and cells named as IPython names them."""
    trace = _FRAME.sub(_with_source, failure.traceback)
    for file in {match["file"] for match in _FILE.finditer(trace)}:
        if cell := cell_name(file):
            trace = trace.replace(f'  File "{file}"', f"  {cell}")
    file, colon, line = failure.where.rpartition(":")
    cell = cell_name(file)
    where = f"{cell}, line {line}" if cell and colon else failure.where
    return replace(failure, traceback=trace, where=where)


def _with_source(frame: re.Match[str]) -> str:
    source = linecache.getline(frame["file"], int(frame["line"])).strip()
    return f"{frame[0]}    {source}\n" if source else frame[0]


def cell_name(file: str) -> str:
    """`Cell In[3]` for a cell of this notebook, "" for any other file."""
    shell = get_ipython()
    label = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(label) if label else ""
