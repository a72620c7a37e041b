"""One step of a trace, sorted for comparing: computations by rank, collectives by axis, when it begins and ends."""

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from labkit.errors import PlanError
from labkit.schedule import COMPUTE
from labkit.spec.checks import shown, whole
from labkit.trace import COLLECTIVES, Event, Trace

__all__ = ["Spans", "Step", "chosen", "length", "merged", "read", "within"]

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        trace: its events.
        time_s: how long it takes (`Trace.step_time_s`).
        start_s: when its first rank begins.
        end_s: when its last rank is done.
        compute: rank -> its computations in order.
        collectives: axis -> rank -> when it was in collectives, in order, without overlap.
        optimizer: rank -> when it was in the optimizer.
    """

    trace: Trace
    time_s: float
    start_s: float
    end_s: float
    compute: Mapping[int, Sequence[Event]]
    collectives: Mapping[str, Mapping[int, Spans]]
    optimizer: Mapping[int, Spans]

    @property
    def stages(self) -> list[int]:
        """Stages that compute."""
        return sorted({event.stage for line in self.compute.values() for event in line if event.stage is not None})

    def seconds_by_stage(self, kinds: Iterable[str] = COMPUTE) -> dict[int, float]:
        """Return the seconds of a stage's computations of these kinds, mean over the ranks that hold it."""
        total: dict[int, float] = defaultdict(float)
        ranks: dict[int, set[int]] = defaultdict(set)
        wanted = frozenset(kinds)
        for rank, line in self.compute.items():
            for event in line:
                if event.stage is not None and event.kind in wanted:
                    total[event.stage] += event.duration_s
                    ranks[event.stage].add(rank)
        return {stage: total[stage] / len(ranks[stage]) for stage in sorted(total)}

    def busy(self, rank: int) -> list[tuple[float, float]]:
        """Return when a rank computed, without overlap."""
        return merged((event.start_s, event.end_s) for event in self.compute.get(rank, ()))


def chosen(name: str, trace: object, step: int | None, *, is_alone: bool = False) -> Trace:
    """Return one step of a trace: `step`, or that of median length among those that every rank finished.

    A prediction's only step is taken whatever its number, where `is_alone` says so.

    Raises:
        PlanError: no trace, one without events, or no such step.
    """
    if not isinstance(trace, Trace):
        raise PlanError(
            f"{name}={shown(trace)} is no trace: what is compared is a Trace. "
            f"Give run.trace, or what lk.predict.step or lk.predict.timeline returned."
        )
    if not trace.num_events:
        raise PlanError(f"{name} has 0 events: a comparison needs a step of each. Record one with trace=True.")
    steps = trace.steps
    if step is not None and not (is_alone and len(steps) == 1):
        wanted = whole("step", step, minimum=0)
        if wanted not in steps:
            there = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise PlanError(f"step={wanted} is not in {name}, whose steps are {there}: choose one of them, or None.")
        return trace.of_step(wanted)
    return trace if len(steps) <= 1 else _median_step(trace)


def _median_step(trace: Trace) -> Trace:
    by_step: dict[int, list[Event]] = defaultdict(list)
    for event in trace.events:
        if event.step is not None:
            by_step[event.step].append(event)
    ranks = set(trace.ranks)
    finished = [one for one, events in by_step.items() if {event.rank for event in events} == ranks]
    times = {one: trace.with_events(by_step[one]).step_time_s for one in finished or by_step}
    middle = statistics.median_low(times.values())
    return trace.with_events(by_step[next(one for one, time_s in times.items() if time_s == middle)])


def read(trace: Trace) -> Step:
    """Sort the events of one step."""
    compute: dict[int, list[Event]] = defaultdict(list)
    collectives: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    optimizer: dict[int, list[tuple[float, float]]] = defaultdict(list)
    events = [event for event in trace.events if event.kind != "memory"] or list(trace.events)
    for event in events:
        if event.kind in COMPUTE:
            compute[event.rank].append(event)
        elif event.kind in COLLECTIVES:
            collectives[event.group or "no axis"][event.rank].append((event.start_s, event.end_s))
        elif event.kind == "optimizer":
            optimizer[event.rank].append((event.start_s, event.end_s))
    start_s, end_s = min(event.start_s for event in events), max(event.end_s for event in events)
    return Step(
        trace=trace,
        time_s=trace.step_time_s if trace.steps else end_s - start_s,
        start_s=start_s,
        end_s=end_s,
        compute=dict(sorted(compute.items())),
        collectives={
            axis: {rank: merged(spans) for rank, spans in by_rank.items()} for axis, by_rank in collectives.items()
        },
        optimizer={rank: merged(spans) for rank, spans in optimizer.items()},
    )


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans in order, those that overlap as one.

    >>> merged([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5)])
    [(0.0, 2.5), (3.0, 4.0)]
    """
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(spans: Spans) -> float:
    """Return the seconds of spans that do not overlap.

    >>> length([(0.0, 2.5), (3.0, 4.0)])
    3.5
    """
    return sum(end - start for start, end in spans)


def within(spans: Spans, start_s: float, end_s: float) -> float:
    """Return how many seconds of ordered spans lie between two times.

    >>> within([(0.0, 2.5), (3.0, 4.0)], 2.0, 3.5)
    1.0
    """
    found = 0.0
    for index in range(max(bisect_left(spans, (start_s, start_s)) - 1, 0), len(spans)):
        start, end = spans[index]
        if start >= end_s:
            break
        found += max(0.0, min(end, end_s) - max(start, start_s))
    return found
