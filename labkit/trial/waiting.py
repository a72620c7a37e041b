"""Where ranks wait, told by the lines of the answer that they stand in."""

import linecache
import re
from collections.abc import Iterable, Mapping, Sequence

from labkit.cluster.frames import cell_name
from labkit.exercise import Wait

__all__ = ["waits_of"]

_FRAME = re.compile(r"^(?P<function>.+?) \((?P<file>.+):(?P<line>\d+)\)$")
_MEETING = "end_together"
# Functions between the answer's call and the operation that are no answer to "what does it wait in?".
_WRAPPERS = frozenset({"wrapper", "_fn", "inner", "decorate_context"})


def waits_of(stacks: Mapping[int, Sequence[str]], ranks: Iterable[int], cells: Mapping[str, str]) -> tuple[Wait, ...]:
    """Say of each rank where it stands.

    Args:
        stacks: frames of each rank that answered, innermost last, as `function (file:line)`.
        ranks: the ranks to tell of.
        cells: the source of each cell that was defined on the ranks, by its name.
    """
    return tuple(_wait(rank, stacks.get(rank), cells) for rank in ranks)


def _wait(rank: int, stack: Sequence[str] | None, cells: Mapping[str, str]) -> Wait:
    if stack is None:
        return Wait(rank=rank, doing="computes without a break, or holds the GIL: it does not answer")
    frames = [match for match in map(_FRAME.match, stack) if match]
    if any(frame["function"] == _MEETING for frame in frames):
        return Wait(rank=rank, doing="has finished, and waits for the others")
    own = [place for place, frame in enumerate(frames) if _cell(frame["file"], cells)]
    if not own:
        return Wait(rank=rank, doing="has not begun")
    frame, deeper = frames[own[-1]], frames[own[-1] + 1 :]
    operation = next((f["function"] for f in deeper if _is_torch(f["file"]) and f["function"] not in _WRAPPERS), "")
    where = f"{_cell(frame['file'], cells)}, line {frame['line']}"
    if source := _line(frame["file"], int(frame["line"]), cells):
        where += f": {source}"
    return Wait(rank=rank, doing=f"waits in {operation}" if operation else "is", where=where)


def _line(file: str, line: int, cells: Mapping[str, str]) -> str:
    lines = cells[file].splitlines() if file in cells else linecache.getlines(file)
    return lines[line - 1].strip() if line <= len(lines) else ""


def _cell(file: str, cells: Mapping[str, str]) -> str:
    return file if file in cells else cell_name(file)


def _is_torch(file: str) -> bool:
    return "/torch/distributed/" in file
