"""A step as it was predicted and as it was measured, on one time axis: for each rank two rows, one above the other."""

from collections.abc import Sequence

import plotly.graph_objects as go

from labkit.errors import PlanError
from labkit.schedule import COMPUTE
from labkit.show import palette
from labkit.show.bars import Bars, bars_by_kind, window_of
from labkit.show.given import HasTrace, trace_of
from labkit.show.units import duration_text, percent_text, time_unit
from labkit.trace import Event, Trace

__all__ = ["overlay"]

# Predicted above the rank's number, measured below: (offset of the upper edge, height, opacity).
_ROWS = {"predicted": (-0.44, 0.3, 0.45), "measured": (-0.12, 0.5, 1.0)}
_ROW_HEIGHT, _LEAST_HEIGHT, _TOP, _BOTTOM, _TICKS = 58, 120, 68, 76, 26
_MAX_NUMBERED_RANKS = 16


def overlay(predicted: Trace | HasTrace, measured: Trace | HasTrace, step: int | None = None) -> go.Figure:
    """Draw forwards and backwards of a prediction (pale, above) over those of a run (below), both from their first one.

    Args:
        predicted: one step, from `lk.predict.timeline`.
        measured: a run, or its trace.
        step: the step of the run to draw; None: the shortest, which the rest of the machine disturbed least.

    Raises:
        PlanError: one of them has no forward or backward, or the run no such step.
    """
    foretold, seen = trace_of(predicted), trace_of(measured)
    seen = _chosen(seen, step)
    drawn = {"predicted": _compute(foretold, "prediction"), "measured": _compute(seen, "run")}
    span_s = max(window_of(events).span_s for events in drawn.values())
    ranks = sorted({event.rank for events in drawn.values() for event in events})
    unit, per_second = time_unit(span_s)
    figure = go.Figure()
    for which, events in drawn.items():
        for bars in bars_by_kind(events, window_of(events)):
            if bars.ranks:
                figure.add_trace(_bars(bars, which, per_second, numbered=len(ranks) <= _MAX_NUMBERED_RANKS))
    notes = [f"{which} (above): {_numbers(trace)}" if which == "predicted" else f"{which} (below): {_numbers(trace)}"
             for which, trace in (("predicted", foretold), ("measured", seen))]  # fmt: skip
    height = _TOP + _BOTTOM + max(_ROW_HEIGHT * len(ranks), _LEAST_HEIGHT)
    palette.dress(figure, title=_title(seen), notes=notes, height=height)
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        uniformtext={"minsize": 8, "mode": "hide"},
        margin={"t": _TOP, "b": _BOTTOM},
        legend={"y": -_TICKS / (height - _TOP - _BOTTOM), "yanchor": "top"},
        hovermode="closest",
    )
    end = span_s * per_second * 1.005
    figure.update_layout(meta={"end": end})
    figure.update_xaxes(range=[0, end], ticksuffix=f" {unit}", showticksuffix="last", ticks="outside")
    figure.update_yaxes(
        tickvals=ranks,
        ticktext=[f"rank {rank}" for rank in ranks],
        range=[max(ranks) + 0.55, min(ranks) - 0.55],
        showgrid=False,
        ticks="",
    )
    return figure


def _chosen(trace: Trace, step: int | None) -> Trace:
    if step is not None:
        if step not in trace.steps:
            there = f"{trace.steps[0]} to {trace.steps[-1]}" if trace.steps else "none"
            raise PlanError(f"step={step!r} is not in the run, its steps are {there}: choose one of them.")
        return trace.of_step(step)
    shortest = min(trace.steps, key=lambda one: trace.of_step(one).step_time_s, default=None)
    return trace if shortest is None else trace.of_step(shortest)


def _compute(trace: Trace, what: str) -> Sequence[Event]:
    events = [event for event in trace.events if event.kind in COMPUTE]
    if not events:
        raise PlanError(f"the {what} has 0 forwards and backwards: an overlay needs 1 or more. Record a step first.")
    return events


def _bars(bars: Bars, which: str, per_second: float, *, numbered: bool) -> go.Bar:
    style = palette.style_of(bars.kind)
    offset, height, opacity = _ROWS[which]
    return go.Bar(
        orientation="h",
        name=style.label,
        y=bars.ranks,
        base=[start * per_second for start in bars.starts_s],
        x=[duration * per_second for duration in bars.durations_s],
        offset=offset,
        width=height,
        opacity=opacity,
        marker={"color": style.color, "line": {"color": "#ffffff", "width": 0.6 if numbered else 0}},
        text=bars.labels if numbered and which == "measured" else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": style.ink, "size": 11},
        hovertext=[f"{which}<br>{text}" for text in bars.hovers],
        hoverinfo="text",
        legendgroup=bars.kind,
        showlegend=which == "measured",
    )


def _numbers(trace: Trace) -> str:
    span_s = window_of([event for event in trace.events if event.kind in COMPUTE]).span_s
    return f"{duration_text(span_s)}, bubble {percent_text(trace.bubble_fraction)}"


def _title(measured: Trace) -> str:
    parts = ["Predicted and measured"]
    if measured.plan is not None:
        parts.append(str(measured.plan.layout))
    if measured.pace is not None:
        parts.append("paced: durations as declared")
    return " · ".join(parts)
