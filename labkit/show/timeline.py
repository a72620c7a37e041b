"""What every rank did, when: one row per rank, compute above, communication below, idle time hatched."""

from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from labkit.errors import PlanError
from labkit.show import palette
from labkit.show.bars import Bars, Window, bars_by_kind, idle_bars, window_of
from labkit.show.given import HasTrace, trace_of
from labkit.show.units import duration_text, percent_text, time_unit
from labkit.trace import Event, Trace

# Lanes of a row of height 1 around the rank's number: (offset of the upper edge, height).
_LANES = {"compute": (-0.42, 0.62), "communication": (0.22, 0.2)}
# Above this many rows a micro-batch's number has no room.
_MAX_NUMBERED_RANKS = 16
_MAX_LABELLED_RANKS = 16
_MAX_STEP_NUMBERS = 12
# Pixels above the first row and below the last: ticks, then the legend, whose lines break at a narrow page's width.
_TOP, _BOTTOM, _TICKS = 68, 76, 26
_LEGEND_LINE, _LEGEND_WIDTH, _LEGEND_ITEM, _LEGEND_LETTER = 20, 760, 56, 6.5
# Height of the strip that names steps, in rows.
_STEP_STRIP = 0.45


def timeline(trace: Trace | HasTrace, step: int | Literal["all"] | None = None) -> go.Figure:
    """Draw a trace, predicted or measured, as one row of bars per rank.

    Args:
        trace: the events, times in seconds; or a run, which has them.
        step: the training step to draw, "all", or None for the last step that every rank finished.

    Returns:
        A figure with one bar trace per kind, in a fixed order, so that one figure can be filled from another.

    Raises:
        PlanError: the trace has no such step.
    """
    trace = trace_of(trace)
    chosen = _choose_step(trace, step)
    shown = trace if chosen is None else trace.of_step(chosen)
    events = list(shown.events)
    window = window_of(events)
    ranks = sorted({event.rank for event in events}) or _all_ranks(trace)
    unit, per_second = time_unit(window.span_s)

    figure = go.Figure()
    figure.add_trace(_idle_trace(idle_bars(events, window), per_second))
    for bars in bars_by_kind(events, window):
        figure.add_trace(_bar_trace(bars, per_second, numbered=len(ranks) <= _MAX_NUMBERED_RANKS))
    if not events:
        figure.add_annotation(text="no events yet", showarrow=False, font={"color": palette.MUTED, "size": 14})
    figure.update_xaxes(showticklabels=bool(events))
    palette.dress(
        figure, title=_title(trace, chosen), notes=_notes(trace, shown, window), height=_height(len(ranks), figure)
    )
    _axes(figure, trace, ranks, window, unit, per_second)
    if chosen is None and events:
        _mark_steps(figure, events, window, per_second)
    return figure


def _all_ranks(trace: Trace) -> list[int]:
    return [0] if trace.plan is None else list(range(trace.plan.layout.world_size))


def _choose_step(trace: Trace, step: int | Literal["all"] | None) -> int | None:
    """The step to draw; None draws everything."""
    if step == "all":
        return None
    by_step: dict[int, set[int]] = {}
    ranks = set()
    for event in trace.events:
        ranks.add(event.rank)
        if event.step is not None:
            by_step.setdefault(event.step, set()).add(event.rank)
    if step is None:
        complete = [number for number, members in by_step.items() if members == ranks]
        return max(complete or by_step, default=None)
    if step not in by_step:
        there = f"{min(by_step)} to {max(by_step)}" if by_step else "none"
        raise PlanError(f"step={step!r} is not in the trace, its steps are {there}: choose one of them or step='all'.")
    return step


def _bar_trace(bars: Bars, per_second: float, *, numbered: bool) -> go.Bar:
    style = palette.style_of(bars.kind)
    placed = _placed(bars, per_second, style.lane)
    return placed.update(
        name=style.label,
        marker={"color": style.color, "line": {"color": "#ffffff", "width": 0.6 if numbered else 0}},
        text=bars.labels if numbered and style.lane == "compute" else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": style.ink, "size": 11},
    )


def _idle_trace(bars: Bars, per_second: float) -> go.Bar:
    pattern = {"shape": "/", "fgcolor": palette.IDLE_HATCH, "size": 6, "solidity": 0.15}
    marker = {"color": palette.IDLE, "line": {"width": 0}, "pattern": pattern}
    return _placed(bars, per_second, "compute").update(name="bubble", marker=marker)


def _placed(bars: Bars, per_second: float, lane: palette.Lane) -> go.Bar:
    """Bars where they stand, without their looks."""
    offset, height = _LANES[lane]
    return go.Bar(
        orientation="h",
        y=np.asarray(bars.ranks, dtype=np.int32),
        base=np.asarray(bars.starts_s) * per_second,
        x=np.asarray(bars.durations_s) * per_second,
        offset=offset,
        width=height,
        hovertext=bars.hovers,
        hoverinfo="text",
        showlegend=bool(bars.ranks),
    )


def _title(trace: Trace, step: int | None) -> str:
    parts = ["Predicted" if trace.origin == "predicted" else "Measured"]
    if trace.plan is not None:
        parts.append(str(trace.plan.layout))
    if step is not None and trace.origin != "predicted":
        parts.append(f"step {step}")
    return " · ".join(parts)


def _notes(trace: Trace, shown: Trace, window: Window) -> list[str]:
    if not shown.events:
        return []
    num_steps = len({event.step for event in shown.events if event.step is not None})
    notes = [
        duration_text(window.span_s if num_steps > 1 else shown.step_time_s)
        + (f" for {num_steps} steps" if num_steps > 1 else " a step"),
        f"bubble {percent_text(shown.bubble_fraction)}",
    ]
    if trace.pace is not None:
        forward, backward = _declared(trace.pace.forward_s), _declared(trace.pace.backward_s)
        notes.append(f"paced: durations as declared: forward {forward}, backward {backward}")
    if trace.origin != "predicted" and not trace.aligned:
        notes.append("clocks are not aligned: compare bars within a rank only")
    return notes


def _declared(seconds: float | tuple[float, ...]) -> str:
    """One duration for all stages, or that of each stage."""
    return "/".join(map(duration_text, seconds)) if isinstance(seconds, tuple) else duration_text(seconds)


def _height(num_ranks: int, figure: go.Figure) -> int:
    row = 46 if num_ranks <= 8 else 30 if num_ranks <= 16 else 13
    return _TOP + _bottom(figure) + max(row * num_ranks, 90)


def _bottom(figure: go.Figure) -> int:
    """Room below the last row: with too little of it, plotly moves the legend up, over the ticks."""
    widths = [_LEGEND_ITEM + _LEGEND_LETTER * len(bars.name) for bars in figure.data if bars.showlegend]
    return _BOTTOM + _LEGEND_LINE * int(sum(widths) // _LEGEND_WIDTH)


def _axes(figure: go.Figure, trace: Trace, ranks: list[int], window: Window, unit: str, per_second: float) -> None:
    labels = [_row_label(trace, rank) for rank in ranks]
    every = 1 if len(ranks) <= 2 * _MAX_LABELLED_RANKS else 4
    width, bottom = max(len(label) for label in labels), _bottom(figure)
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        uniformtext={"minsize": 8, "mode": "hide"},
        margin={"l": 24 + 7 * width, "t": _TOP, "b": bottom},
        legend={"y": -_TICKS / (figure.layout.height - _TOP - bottom), "yanchor": "top"},
        hovermode="closest",
    )
    end = window.span_s * per_second * 1.005
    # Whoever sets another range, to compare two timelines, finds here what this one's own is.
    figure.update_layout(meta={"end": end})
    figure.update_xaxes(range=[0, end], ticksuffix=f" {unit}", showticksuffix="last", ticks="outside")
    figure.update_yaxes(
        tickmode="array",
        tickvals=ranks[::every],
        ticktext=labels[::every],
        range=[max(ranks) + 0.55, min(ranks) - 0.55],
        showgrid=False,
        ticks="",
        tickfont={"size": 11 if len(ranks) <= _MAX_LABELLED_RANKS else 9},
    )


def _row_label(trace: Trace, rank: int) -> str:
    """`rank 3 · dp1 pp1`: the rank and its place on the axes that have more than one."""
    if trace.plan is None:
        return f"rank {rank}"
    layout = trace.plan.layout
    try:
        places = trace.plan.placement(rank)
    except (LookupError, ValueError):
        return f"rank {rank}"
    degrees = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp}
    shown = [f"{axis}{place}" for (axis, degree), place in zip(degrees.items(), places, strict=True) if degree > 1]
    return " · ".join([f"rank {rank}", " ".join(shown)]) if shown else f"rank {rank}"


def _mark_steps(figure: go.Figure, events: list[Event], window: Window, per_second: float) -> None:
    """A dotted line where each step starts, its number in a strip below the last row."""
    starts: dict[int, float] = {}
    for event in events:
        if event.step is not None and event.kind != "memory":
            starts[event.step] = min(event.start_s, starts.get(event.step, event.start_s))
    below, above = figure.layout.yaxis.range
    figure.update_yaxes(range=[below + _STEP_STRIP, above])
    line: dict[str, Any] = {"color": palette.MUTED, "width": 1, "dash": "dot"}
    every = -(-len(starts) // _MAX_STEP_NUMBERS)
    for index, (number, start) in enumerate(sorted(starts.items())):
        x = (start - window.start_s) * per_second
        figure.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, yref="paper", line=line, layer="below")
        if index % every == 0:
            figure.add_annotation(
                x=x,
                y=0,
                yref="paper",
                yanchor="bottom",
                xanchor="left",
                text=f"step {number}",
                showarrow=False,
                font={"size": 10, "color": palette.MUTED},
            )
