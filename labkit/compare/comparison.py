"""What a comparison found, as values: rows of numbers, gaps of the step time, and a sentence."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.plan.text import html_table, text_table
from labkit.trace import Trace

__all__ = ["Cause", "Comparison", "Row", "Span", "seconds_text"]

_MOST_LINES = 8
_LEAST = 0.005
"""Gaps below this share of the step are only counted where a comparison is printed."""
_NOTHING_S = 1e-10


class Span(NamedTuple):
    """A stretch of a rank's time in the measured step."""

    rank: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity of both steps.

    Attributes:
        what: "step time", "bubble", "imbalance" (the slowest stage's computation over the stages' mean), "compute" (of
            a stage in a step), "forward" and "backward" (of one micro-batch), "waiting" (idle for another stage's
            message), "collectives" (of one axis), "optimizer", or "late start" (until a rank's first action).
        unit: "s", "fraction" or "ratio".
        predicted: the first trace's, None where it has nothing of the kind.
        measured: the second's.
        stage: of which stage.
        rank: of which rank; what names neither is a mean over ranks.
        axis: over which axis.
    """

    what: str
    unit: str = "s"
    predicted: float | None
    measured: float | None
    stage: int | None = None
    rank: int | None = None
    axis: str | None = None

    @property
    def difference(self) -> float | None:
        """Measured minus predicted; None where one of them is missing."""
        if self.predicted is None or self.measured is None:
            return None
        return self.measured - self.predicted

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where there is none."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None

    @property
    def where(self) -> str:
        """The stage, rank or axis.

        >>> Row(what="compute", predicted=1.0, measured=2.0, stage=2).where
        'stage 2'
        """
        for name in ("stage", "rank"):
            if (value := getattr(self, name)) is not None:
                return f"{name} {value}"
        return self.axis or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One gap between two steps.

    Attributes:
        what: "compute", "late start", "messages" (between stages), "between actions", "collectives", "optimizer",
            "waiting" (of ranks, where schedules differ) or "other".
        seconds: how much longer the step is for it.
        share: of the difference of the step times; all shares add up to 1. 0 where the times are equal.
        text: the gap in a few words.
        stage: of which stage.
        rank: of which rank.
        axis: over which axis.
        spans: where in the measured step the time went.
    """

    what: str
    seconds: float
    share: float
    text: str
    stage: int | None = None
    rank: int | None = None
    axis: str | None = None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """Two steps side by side.

    Attributes:
        predicted: the first step's trace.
        measured: the second's.
        rows: quantities of both.
        causes: gaps of the step time, largest first; together they are the whole difference.
        sentence: what to make of it.
    """

    predicted: Trace
    measured: Trace
    rows: tuple[Row, ...]
    causes: tuple[Cause, ...]
    sentence: str

    @property
    def names(self) -> tuple[str, str]:
        """What the two are called: their origins, or first and second where these are the same."""
        one, two = self.predicted.origin, self.measured.origin
        return (one, two) if one != two else ("first", "second")

    @property
    def step_time(self) -> Row:
        """The row of the step time."""
        return self.rows[0]

    def of(self, what: str) -> tuple[Row, ...]:
        """Return the rows of one quantity."""
        return tuple(row for row in self.rows if row.what == what)

    def headline(self) -> str:
        """Which steps are compared, and their times."""
        sides = [
            f"{name} {_layout_text(trace)}step {trace.steps[0] if trace.steps else '-'}"
            for name, trace in zip(self.names, (self.predicted, self.measured), strict=True)
        ]
        return f"{sides[0]} and {sides[1]}"

    def __str__(self) -> str:
        lines = [text_table(self.headline(), self._columns(), self._cells()), *self._remarks(), self.sentence]
        return "\n".join(lines)

    def __repr__(self) -> str:
        row = self.step_time
        return f"<Comparison of {self.headline()}: {_value(row, row.predicted)} and {_value(row, row.measured)}>"

    def _repr_html_(self) -> str:
        gaps = "".join(f"<li>{html.escape(one)}</li>" for one in self._remarks())
        table = html_table(self.headline(), self._columns(), self._cells())
        return f"<p><b>{html.escape(self.sentence)}</b></p>{table}<ul>{gaps}</ul>"

    def _columns(self) -> tuple[str, ...]:
        return ("what", "where", *self.names, "difference", "")

    def _cells(self) -> list[list[str]]:
        return [cell for what in dict.fromkeys(row.what for row in self.rows) for cell in self._group(self.of(what))]

    def _group(self, rows: Sequence[Row]) -> list[list[str]]:
        """Lines of one quantity: stages or ranks that look the same are one; of many lines, those that differ most."""
        alike: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            alike.setdefault(self._numbers(row), []).append(row)
        lines = [(abs(members[0].difference or 0.0), members) for members in alike.values()]
        least = sorted((size for size, _ in lines), reverse=True)[:_MOST_LINES][-1]
        kept = [members for size, members in lines if size >= least][:_MOST_LINES]
        cells = [[rows[0].what, _where(members), *self._numbers(members[0])] for members in kept]
        left = len(rows) - sum(map(len, kept))
        return [*cells, [rows[0].what, f"{left} more", "", "", "see .rows", ""]] if left else cells

    def _numbers(self, row: Row) -> tuple[str, ...]:
        difference, change = "", ""
        if row.difference is None:
            sides = zip(self.names, (row.predicted, row.measured), strict=True)
            difference = next((f"only {name}" for name, value in sides if value is not None), "unknown")
        else:
            difference = _value(row, row.difference, sign=True)
            if row.unit == "s" and row.ratio is not None:
                change = f"{100 * (row.ratio - 1):+.0f} %".replace("-0 %", "+0 %")
        return _value(row, row.predicted), _value(row, row.measured), difference, change

    def _remarks(self) -> list[str]:
        """The gaps that matter, and what could not be compared."""
        least = _LEAST * (self.step_time.measured or 0.0)
        kept = [one for one in self.causes if abs(one.seconds) >= least][:_MOST_LINES]
        lines = [f"{seconds_text(one.seconds, sign=True)} ({100 * one.share:.0f} %): {one.text}" for one in kept]
        if more := len(self.causes) - len(kept):
            lines.append(f"{more} smaller gap{'s' * (more > 1)}: see .causes")
        if not (self.predicted.aligned and self.measured.aligned):
            lines.append("clocks are not aligned: times of different ranks are not compared")
        return lines


def seconds_text(seconds: float, *, sign: bool = False) -> str:
    """Write a time with three digits.

    >>> seconds_text(0.0204), seconds_text(1.5, sign=True), seconds_text(0.0)
    ('20.4 ms', '+1.5 s', '0 ms')
    """
    plus = "+" if sign and abs(seconds) >= _NOTHING_S else ""
    if abs(seconds) >= 1:
        return f"{seconds:{plus}.3g} s"
    return f"{1e3 * seconds:{plus}.3g} ms" if abs(seconds) >= _NOTHING_S else "0 ms"


def _layout_text(trace: Trace) -> str:
    return f"'{trace.plan.layout}' " if trace.plan is not None else ""


def _where(rows: Sequence[Row]) -> str:
    """`stages 0, 1 and 3-5`."""
    first = rows[0]
    if len(rows) == 1:
        return first.where
    kind = "stage" if first.stage is not None else "rank"
    numbers = sorted(number for row in rows if (number := getattr(row, kind)) is not None)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{kind}s {', '.join(parts)}"


def _value(row: Row, value: float | None, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    if value is None:
        return "-"
    if row.unit == "fraction":
        return f"{100 * value:{plus}.1f} {'points' if sign else '%'}"
    return seconds_text(value, sign=sign) if row.unit == "s" else f"{value:{plus}.2f}"
