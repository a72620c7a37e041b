"""The exceptions of the lab.

```
LabError
├── PlanError(ValueError)       impossible model, layout, schedule, plan or option
├── ClusterError(RuntimeError)  ranks did not start, or not enough of them
├── RankError(RuntimeError)     code raised on ranks; .failures {rank: Failure}
├── RankLost(RuntimeError)      a process died; .rank .step .signal
├── RankTimeout(TimeoutError)   .missing .action .step
├── CheckpointError(RuntimeError)
└── InjectedFault(RuntimeError) raised only where a fault fires
```

Messages read: fact with both numbers, the rule, the computed fix.
"""

import os
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = [
    "CheckpointError",
    "ClusterError",
    "Failure",
    "InjectedFault",
    "LabError",
    "PlanError",
    "RankError",
    "RankLost",
    "RankTimeout",
    "ranks_text",
    "short_traceback",
    "shorten_traceback",
    "text_of",
]

MAX_TRACEBACKS = 4
# Where an error shows how it came about in the notebook, so many of the notebook's own lines are enough.
MAX_OWN_LINES = 3
MAX_MESSAGE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 8_000

_CELL = re.compile(r"(ipykernel_\d+[/\\]\d+\.py|<ipython-input-[^>]*>)$")


class LabError(Exception):
    """Every error that the lab raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, self.__dict__)

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of thirty lines of the lab's insides; IPython looks for this method."""
        return short_traceback(self)


class PlanError(LabError, ValueError):
    """An impossible model, layout, schedule, plan or option; raised before anything starts."""


class ClusterError(LabError, RuntimeError):
    """Ranks did not start, are not enough, or were stopped."""


class CheckpointError(LabError, RuntimeError):
    """A checkpoint cannot be written or read."""


class InjectedFault(LabError, RuntimeError):
    """Raised only where an injected fault fires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What one rank's code raised.

    Attributes:
        type: the exception's class name.
        message: its text.
        traceback: the rank's own frames, as text.
        where: `file:line` of the innermost frame of the caller's code.
        interrupted: whether the lab freed the rank, so that this is a consequence and not a cause.
    """

    type: str
    message: str
    traceback: str = ""
    where: str = ""
    interrupted: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", _cut(self.message, MAX_MESSAGE_CHARS))
        object.__setattr__(self, "traceback", _cut(self.traceback, MAX_TRACEBACK_CHARS))

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class RankError(LabError, RuntimeError):
    """Code raised on one or more ranks.

    Attributes:
        failures: what each rank raised, by rank; ranks that were only freed stand in `freed`.
        freed: ranks that waited for the failed ones and were freed by the lab.
    """

    def __init__(self, failures: Mapping[int, Failure], *, freed: Iterable[int] = (), action: str = "") -> None:
        self.failures = dict(failures)
        self.freed = tuple(freed)
        self.action = action
        super().__init__(self._text())

    def _text(self) -> str:
        lines = []
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, failure in sorted(self.failures.items()):
            groups.setdefault((str(failure), failure.where), []).append(rank)
        for (text, where), ranks in list(groups.items())[:MAX_TRACEBACKS]:
            at = f" at {where}" if where else ""
            lines.append(f"[{ranks_text(ranks)}] {text}{at}")
            if trace := self.failures[ranks[0]].traceback:
                lines.append(trace.rstrip())
        if len(groups) > MAX_TRACEBACKS:
            left = [rank for ranks in list(groups.values())[MAX_TRACEBACKS:] for rank in ranks]
            lines.append(f"... and {len(groups) - MAX_TRACEBACKS} other errors on {ranks_text(left)}: see .failures.")
        if self.freed:
            lines.append(f"{ranks_text(self.freed)} waited for the failed ranks and were freed.")
        return "\n".join(lines)


class RankLost(LabError, RuntimeError):
    """A rank's process died.

    Attributes:
        rank: the rank that died first.
        step: the training step, where one was running.
        signal: the signal's name, such as `SIGKILL`, or "" when the process exited by itself.
        lost: every rank that died.
    """

    def __init__(
        self, message: str, *, rank: int, step: int | None = None, signal: str = "", lost: Iterable[int] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.signal = signal
        self.lost = tuple(lost) or (rank,)


class RankTimeout(LabError, TimeoutError):
    """Ranks did not answer in time.

    Attributes:
        missing: the ranks that did not answer.
        action: what they were asked to do.
        step: the training step, where one was running.
    """

    def __init__(self, message: str, *, missing: Iterable[int], action: str = "", step: int | None = None) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.action = action
        self.step = step


def ranks_text(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence.

    >>> ranks_text([2])
    'rank 2'
    >>> ranks_text([0, 1, 3])
    'ranks 0, 1 and 3'
    """
    names = [str(rank) for rank in ranks]
    if not names:
        return "no rank"
    return f"rank{'s' * (len(names) != 1)} {listed(names)}"


def listed(names: Iterable[str]) -> str:
    """Name things in a sentence.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _remade(kind: type[LabError], args: tuple[Any, ...], fields: dict[str, Any]) -> LabError:
    """An error as it was pickled: its fields are not the arguments of `BaseException`."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


def short_traceback(error: BaseException) -> list[str]:
    """The lines of the notebook (or script) that led to an error, then its message: no frame of the lab's."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_caller(frame)]
    lines = []
    for frame in own[-MAX_OWN_LINES:]:
        place = "cell" if _CELL.search(frame.filename) else frame.filename
        lines.append(f"{place}, line {frame.lineno}: {frame.line}")
    text = text_of(error)
    return [*lines, f"{type(error).__name__}: {text}" if text else type(error).__name__]


def shorten_traceback(error: BaseException) -> None:
    """Have IPython show the notebook's lines of an error that is not the lab's own, not where in the lab it waited."""
    error._render_traceback_ = partial(short_traceback, error)  # type: ignore[attr-defined]


def text_of(error: BaseException) -> str:
    """The text of an exception, also of one whose text cannot be made."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as broken:  # a text that raises SystemExit must not end a rank
        return f"(its text cannot be made: {type(broken).__name__})"


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def _is_of_caller(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is neither the lab's nor of the libraries between it and the notebook."""
    if (frame.line or "").startswith("get_ipython().run_"):
        return False  # the whole cell under a %%px, which stands just above
    inside = frame.filename.startswith((_HERE, "<frozen ")) or "site-packages" in frame.filename
    return bool(_CELL.search(frame.filename)) or not inside


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
