"""Where ranks wait, told by the lines of the answer that they stand in."""

import re
from collections.abc import Iterable, Mapping, Sequence

from labkit.exercise import Wait
from labkit.trial.places import Places

__all__ = ["FINISHED", "waits_of"]

# What a rank does that has returned from the answer.
FINISHED = "has finished, and waits for the others"

_FRAME = re.compile(r"^(?P<function>.+?) \((?P<file>.+):(?P<line>\d+)\)$")
_MEETING = "end_together"
# Functions between the answer's call and the operation that are no answer to "what does it wait in?".
_WRAPPERS = frozenset({"wrapper", "_fn", "inner", "decorate_context"})


def waits_of(stacks: Mapping[int, Sequence[str]], ranks: Iterable[int], places: Places) -> tuple[Wait, ...]:
    """Say of each rank where it stands.

    Args:
        stacks: frames of each rank that answered, innermost last, as `function (file:line)`.
        ranks: the ranks to tell of.
        places: the lines of the answer.
    """
    return tuple(_wait(rank, stacks.get(rank), places) for rank in ranks)


def _wait(rank: int, stack: Sequence[str] | None, places: Places) -> Wait:
    if stack is None:
        return Wait(rank=rank, doing="computes without a break, or holds the GIL: it does not answer")
    frames = [match for match in map(_FRAME.match, stack) if match]
    if any(frame["function"] == _MEETING for frame in frames):
        return Wait(rank=rank, doing=FINISHED)
    own = [index for index, frame in enumerate(frames) if places.name(frame["file"])]
    if not own:
        return Wait(rank=rank, doing="is outside the answer: before it begins, or after it returned")
    frame, deeper = frames[own[-1]], frames[own[-1] + 1 :]
    operation = next((f["function"] for f in deeper if _is_torch(f["file"]) and f["function"] not in _WRAPPERS), "")
    where = places.told(frame["file"], int(frame["line"]))
    return Wait(rank=rank, doing=f"waits in {operation}" if operation else "is", where=where)


def _is_torch(file: str) -> bool:
    return "/torch/distributed/" in file
