"""Raw rows that ranks emitted while they trained -> one measured `Trace`."""

from collections.abc import Iterable, Sequence
from typing import Any

from labkit.measure.alignment import Alignment
from labkit.plan import Plan
from labkit.spec import Pace
from labkit.trace import Event, Trace

__all__ = ["Row", "events", "trace"]

Row = Sequence[Any]
"""`[kind, start_s, duration_s, step, ...]` as `Event.from_row` reads it; `start_s` on the clock of the rank's host."""


def events(rows: Iterable[tuple[int, Row]], alignment: Alignment, *, zero_s: float = 0.0) -> list[Event]:
    """Put rows on this process's clock.

    Args:
        rows: `(rank, row)` pairs in any order.
        alignment: the clocks.
        zero_s: which moment of this process's monotonic clock becomes 0.
    """
    lines: dict[int, tuple[float, float, float]] = {}
    placed = []
    for rank, row in rows:
        if rank not in lines:
            lines[rank] = alignment.line(rank)
        at, offset, drift = lines[rank]
        start_s = row[1] + offset + drift * (row[1] - at) - zero_s
        placed.append(Event.from_row(rank, [row[0], start_s, *row[2:]]))
    return placed


def trace(plan: Plan, rows: Iterable[tuple[int, Row]], alignment: Alignment, *, pace: Pace | None = None) -> Trace:
    """All ranks on one clock, the first event at 0 s.

    Args:
        plan: what ran.
        rows: `(rank, row)` pairs in any order.
        alignment: the clocks.
        pace: what durations the run declared, if it was paced.

    Returns:
        A trace with `origin="measured"`, and `aligned=False` where the clock of a rank in it was never read.
    """
    placed = events(rows, alignment)
    ranks = frozenset(event.rank for event in placed)
    measured = Trace(placed, origin="measured", plan=plan, pace=pace, aligned=alignment.covers(ranks))
    return measured.shifted()
