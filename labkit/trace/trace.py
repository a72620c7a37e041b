"""All events of a run, predicted or measured, and totals over them."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from labkit.errors import LabError
from labkit.plan import Plan
from labkit.schedule import COMPUTE
from labkit.spec import Pace
from labkit.spec.checks import choice, flag, shown
from labkit.trace import chrome, jsonl
from labkit.trace.event import Event

__all__ = ["ORIGINS", "Trace"]

ORIGINS = ("measured", "predicted")


@dataclass(frozen=True, slots=True)
class Trace:
    """What every rank did, on one clock.

    Attributes:
        events: in order of start.
        origin: "measured" or "predicted".
        plan: what was run, or None.
        pace: declared durations of the run (`labkit.spec.Pace`), or None.
        aligned: whether the ranks' clocks were aligned; if not, only times within one rank compare.

    Raises:
        LabError: events that are none.
        PlanError: an unknown origin.

    >>> trace = Trace([Event(0, "F", 0.0, 1.0, step=0), Event(0, "B", 1.0, 2.0, step=0)], "predicted")
    >>> trace.step_time_s, trace.bubble_fraction, trace.num_steps
    (3.0, 0.0, 1)
    """

    events: tuple[Event, ...]
    origin: str = "measured"
    plan: Plan | None = None
    pace: Pace | None = None
    aligned: bool = True

    def __init__(
        self,
        events: Iterable[Event],
        origin: str = "measured",
        plan: Plan | None = None,
        pace: Pace | None = None,
        aligned: bool = True,
    ) -> None:
        listed = list(events)
        for event in listed:
            if not isinstance(event, Event):
                raise LabError(f"{shown(event)} is no event: a trace holds Event values.")
        if not isinstance(plan, Plan | None):
            raise LabError(f"plan {shown(plan)} is no Plan: use labkit.plan.build(model, layout) or None.")
        if not isinstance(pace, Pace | None):
            raise LabError(f"pace {shown(pace)} is no Pace: use Pace(forward_s=0.05, backward_s=0.1) or None.")
        ordered = sorted(listed, key=lambda event: (event.start_s, event.rank))
        object.__setattr__(self, "events", tuple(ordered))
        object.__setattr__(self, "origin", choice("origin", origin, ORIGINS))
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "pace", pace)
        object.__setattr__(self, "aligned", flag("aligned", aligned))

    @property
    def ranks(self) -> list[int]:
        """Ranks that have events."""
        return sorted({event.rank for event in self.events})

    @property
    def steps(self) -> list[int]:
        """Steps that have events."""
        return sorted({event.step for event in self.events if event.step is not None})

    @property
    def num_steps(self) -> int:
        """How many steps have events."""
        return len(self.steps)

    @property
    def num_events(self) -> int:
        """How many events there are."""
        return len(self.events)

    @property
    def step_time_s(self) -> float:
        """Median over steps of a step's time in seconds; 0.0 without steps.

        A step's time is its slowest rank's "step" event; where no rank recorded one, last end minus first start.
        """
        by_step = self._by_step()
        return statistics.median(_step_time_s(events) for events in by_step.values()) if by_step else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Idle / total over the compute of a step, median over steps; 0.0 without compute events.

        Total is (last end - first start of any rank's forward or backward) x ranks that computed; idle is the part in
        which a rank ran no forward or backward. So for a pipeline with equal durations it is (p - 1) / (m + p - 1), and
        the optimizer and the gradients' all-reduce after the last backward do not count.
        """
        fractions = [fraction for events in self._by_step().values() if (fraction := _idle(events)) is not None]
        return statistics.median(fractions) if fractions else 0.0

    @property
    def peak_bytes(self) -> int:
        """Largest memory that any rank recorded; 0 where none did."""
        return max(self.peak_bytes_by_rank.values(), default=0)

    @property
    def peak_bytes_by_rank(self) -> dict[int, int]:
        """Largest memory recorded, by rank; ranks without "memory" events are left out."""
        peaks: dict[int, int] = {}
        for event in self.events:
            if event.kind == "memory" and event.num_bytes is not None:
                peaks[event.rank] = max(event.num_bytes, peaks.get(event.rank, 0))
        return dict(sorted(peaks.items()))

    def of_step(self, step: int) -> Self:
        """Return the trace of one step.

        Raises:
            LabError: no event has that step.

        >>> Trace([Event(0, "F", 0.0, 1.0, step=0), Event(0, "F", 1.0, 1.0, step=1)]).of_step(1).num_events
        1
        """
        kept = [event for event in self.events if event.step == step and step is not None]
        if not kept:
            steps = self.steps
            have = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
            raise LabError(f"step {shown(step)} has no event in this trace: {have}.")
        return self.with_events(kept)

    def of_rank(self, rank: int) -> Self:
        """Return the trace of one rank (empty where it has no events).

        >>> Trace([Event(0, "F", 0.0, 1.0), Event(1, "F", 1.0, 1.0)]).of_rank(1).ranks
        [1]
        """
        return self.with_events(event for event in self.events if event.rank == rank)

    def with_events(self, events: Iterable[Event]) -> Self:
        """Return this trace with other events.

        >>> Trace([], "predicted").with_events([Event(0, "F", 0.0, 1.0)]).origin
        'predicted'
        """
        return type(self)(events, self.origin, self.plan, self.pace, self.aligned)

    def shifted(self) -> Self:
        """Return this trace with its first event at 0 s.

        >>> Trace([Event(0, "F", 5.0, 1.0)]).shifted().events[0].start_s
        0.0
        """
        start_s = self.events[0].start_s if self.events else 0.0
        return self.with_events(replace(event, start_s=event.start_s - start_s) for event in self.events)

    def to_jsonl(self, path: str | Path | None = None) -> str:
        """Return the trace as JSON lines (a header, then an event a line), and write it to `path` if given.

        >>> print(Trace([Event(0, "F", 0.0, 1.0)], "predicted").to_jsonl().splitlines()[1])
        [0, "F", 0.0, 1.0]
        """
        text = jsonl.dump(self.events, self.origin, self.plan, self.pace, self.aligned)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_jsonl(cls, source: str | Path) -> Self:
        """Read JSON lines: a `Path`, or the text itself. The inverse of `to_jsonl`.

        Raises:
            LabError: no trace, naming the line.

        >>> trace = Trace([Event(0, "F", 0.0, 1.0)], "predicted")
        >>> Trace.from_jsonl(trace.to_jsonl()) == trace
        True
        """
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        return cls(*jsonl.load(text))

    def to_chrome(self, path: str | Path | None = None) -> str:
        """Return Chrome trace JSON (chrome://tracing, Perfetto; one process per rank), and write it if `path` is given.

        >>> '"traceEvents"' in Trace([Event(0, "F", 0.0, 1.0)]).to_chrome()
        True
        """
        text = chrome.dump(self.events)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _by_step(self) -> dict[int, list[Event]]:
        by_step: dict[int, list[Event]] = {}
        for event in self.events:
            if event.step is not None:
                by_step.setdefault(event.step, []).append(event)
        return by_step

    def __str__(self) -> str:
        return (
            f"{self.origin} trace: {self.num_events} events of {len(self.ranks)} ranks, {self.num_steps} steps of "
            f"{self.step_time_s * 1e3:.1f} ms, bubble {self.bubble_fraction:.1%}"
        )

    def __repr__(self) -> str:
        return f"<{self}>"


def _step_time_s(events: list[Event]) -> float:
    whole_steps = [event.duration_s for event in events if event.kind == "step"]
    if whole_steps:
        return max(whole_steps)
    return max(event.end_s for event in events) - min(event.start_s for event in events)


def _idle(events: list[Event]) -> float | None:
    compute = [event for event in events if event.kind in COMPUTE]
    if not compute:
        return None
    span = max(event.end_s for event in compute) - min(event.start_s for event in compute)
    total = span * len({event.rank for event in compute})
    return 1.0 - _busy(compute) / total if total > 0 else 0.0


def _busy(compute: list[Event]) -> float:
    """Seconds in which ranks computed, overlaps of one rank counted once; `compute` is in order of start."""
    busy = 0.0
    until: dict[int, float] = {}
    for event in compute:
        end = until.get(event.rank, event.start_s)
        busy += max(0.0, event.end_s - max(event.start_s, end))
        until[event.rank] = max(end, event.end_s)
    return busy
