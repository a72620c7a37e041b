"""Events shaped into bars: what the timeline draws, as arrays, before anything is drawn."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.schedule import COMPUTE
from labkit.show.palette import NOT_BARS, STYLES, style_of
from labkit.show.units import duration_text, traffic_text
from labkit.trace import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Every bar of one kind: equal-length lists, times in seconds since the window's start."""

    kind: str
    ranks: list[int]
    starts_s: list[float]
    durations_s: list[float]
    labels: list[str]
    hovers: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The stretch of time a picture shows, in the trace's own seconds."""

    start_s: float
    end_s: float

    @property
    def span_s(self) -> float:
        """Its length in seconds."""
        return self.end_s - self.start_s


def window_of(events: Iterable[Event]) -> Window:
    """From the first start to the last end of the events (0 to 1 second when there are none)."""
    bars = [event for event in events if event.kind != "memory"]
    if not bars:
        return Window(start_s=0.0, end_s=1.0)
    return Window(start_s=min(event.start_s for event in bars), end_s=max(event.end_s for event in bars))


def bars_by_kind(events: Sequence[Event], window: Window) -> list[Bars]:
    """Group events by kind. Every known kind comes, in one order, so that a live figure can be filled anew.

    A bar is labelled with its micro-batch, or with its whole action where ranks hold several stages.
    """
    held = {(event.rank, event.stage) for event in events if event.kind in COMPUTE and event.stage is not None}
    has_several = len(held) > len({rank for rank, _ in held})
    groups: dict[str, list[Event]] = {kind: [] for kind in STYLES}
    for event in events:
        if event.kind not in NOT_BARS:
            groups.setdefault(event.kind, []).append(event)
    return [_bars(kind, members, window, has_several) for kind, members in groups.items()]


def idle_bars(events: Sequence[Event], window: Window) -> Bars:
    """The bubble: gaps between forwards and backwards, from the first of a step on any rank to the last of it.

    The hatched part of this stretch is `Trace.bubble_fraction`, to the letter.
    """
    steps: dict[int | None, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in COMPUTE:
            steps[event.step].append(event)
    idle = [(rank, start, end) for members in steps.values() for rank, start, end in _idle(members)]
    return Bars(
        kind="idle",
        ranks=[rank for rank, _, _ in idle],
        starts_s=[start - window.start_s for _, start, _ in idle],
        durations_s=[end - start for _, start, end in idle],
        labels=[""] * len(idle),
        hovers=[f"<b>rank {rank} · idle</b><br>{duration_text(end - start)}" for rank, start, end in idle],
    )


def _idle(compute: Sequence[Event]) -> list[tuple[int, float, float]]:
    """(rank, start, end) of every gap within one step's compute."""
    stretch = window_of(compute)
    busy: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in compute:
        busy[event.rank].append((event.start_s, event.end_s))
    return [(rank, *gap) for rank, spans in sorted(busy.items()) for gap in gaps(spans, stretch)]


def gaps(spans: Iterable[tuple[float, float]], window: Window) -> list[tuple[float, float]]:
    """What of the window the (start, end) spans leave uncovered, in order.

    >>> gaps([(1.0, 2.0), (1.5, 3.0)], Window(start_s=0.0, end_s=4.0))
    [(0.0, 1.0), (3.0, 4.0)]
    """
    found = []
    reached = window.start_s
    for start, end in sorted(spans):
        if start > reached:
            found.append((reached, min(start, window.end_s)))
        reached = max(reached, end)
    if reached < window.end_s:
        found.append((reached, window.end_s))
    return [(start, end) for start, end in found if end > start]


def _bars(kind: str, events: Sequence[Event], window: Window, has_several: bool) -> Bars:
    return Bars(
        kind=kind,
        ranks=[event.rank for event in events],
        starts_s=[event.start_s - window.start_s for event in events],
        durations_s=[event.duration_s for event in events],
        labels=[_label(event, has_several) for event in events],
        hovers=[_hover(event, window) for event in events],
    )


def _label(event: Event, has_several: bool) -> str:
    if event.microbatch is None:
        return ""
    return event.label if has_several else str(event.microbatch)


def _hover(event: Event, window: Window) -> str:
    lines = [f"<b>rank {event.rank} · {style_of(event.kind).label}</b>"]
    place = []
    if event.stage is not None:
        place.append(f"stage {event.stage}")
    if event.microbatch is not None:
        place.append(f"micro-batch {event.microbatch}")
    if place:
        lines.append(", ".join(place))
    if event.group is not None:
        sequence = "" if event.seq is None else f", number {event.seq}"
        lines.append(f"over {event.group}{sequence}")
    if event.peer is not None:
        lines.append(f"{'from' if event.kind.startswith('RECV') else 'to'} rank {event.peer}")
    if event.num_bytes is not None:
        lines.append(traffic_text(event.num_bytes))
    start = (event.start_s - window.start_s) * 1e3
    lines.append(f"{event.duration_s * 1e3:.2f} ms, from {start:.2f} to {start + event.duration_s * 1e3:.2f} ms")
    if event.step is not None:
        lines.append(f"step {event.step}")
    return "<br>".join(lines)
