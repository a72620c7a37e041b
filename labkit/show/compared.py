"""Two steps over each other on one time axis, the gaps between them marked and named: a picture of a comparison."""

import textwrap
from collections.abc import Sequence

import plotly.graph_objects as go

from labkit.compare import Cause, Comparison
from labkit.errors import PlanError
from labkit.schedule import COMPUTE
from labkit.show import palette
from labkit.show.bars import Bars, Window, bars_by_kind, window_of
from labkit.show.units import duration_text, percent_text, time_unit
from labkit.spec.checks import shown
from labkit.trace import COLLECTIVES, Trace

__all__ = ["compared"]

# Lanes around a rank's place, the first step above the second: (offset of the upper edge, height), then the opacity.
_LANES = ({"compute": (-0.46, 0.24), "communication": (-0.22, 0.07)},
          {"compute": (-0.11, 0.34), "communication": (0.23, 0.1)})  # fmt: skip
_OPACITY = (0.45, 1.0)
_LABEL = 0.41
_DRAWN = frozenset({*COMPUTE, *COLLECTIVES, "optimizer"})
_GAP = "#C1121F"
_ROW_HEIGHT, _LEAST_HEIGHT, _TOP, _BOTTOM, _TICKS, _LINE = 74, 130, 84, 84, 26, 18
_SENTENCE_CHARACTERS = 118
_MOST_RANKS, _MOST_LABELS, _LEAST_SHARE = 16, 3, 0.03


def compared(comparison: Comparison) -> go.Figure:
    """Draw both steps of a comparison, each from its own beginning: the first pale and above, the second below.

    Red is what the second step takes longer, where it does; the largest gaps are named. Of many ranks those are drawn
    that the gaps are about, and the first of each stage.

    Args:
        comparison: from `lk.compare.traces`.

    Raises:
        PlanError: no comparison.
    """
    given: object = comparison
    if not isinstance(given, Comparison):
        raise PlanError(f"{shown(given)} is no comparison: give what lk.compare.traces(predicted, measured) returned.")
    sides = (comparison.predicted, comparison.measured)
    windows = [window_of(trace.events) for trace in sides]
    unit, per_second = time_unit(max(window.span_s for window in windows))
    named = _named(comparison)
    ranks = _ranks(comparison, named)
    rows = {rank: row for row, rank in enumerate(ranks)}
    figure = go.Figure()
    for side, (trace, window) in enumerate(zip(sides, windows, strict=True)):
        events = [event for event in trace.events if event.kind in _DRAWN and event.rank in rows]
        for bars in bars_by_kind(events, window):
            if bars.ranks:
                figure.add_trace(_bars(bars, side, comparison.names[side], rows, per_second))
    figure.add_trace(_gaps(named, rows, windows[1], per_second))
    _dress(figure, comparison, ranks, max(window.span_s for window in windows) * per_second, unit)
    _mark_ends(figure, comparison, windows, per_second)
    _label(figure, named, rows, windows[1], per_second)
    return figure


def _named(comparison: Comparison) -> list[Cause]:
    """Gaps that are marked: what makes the second step longer, and enough of it."""
    least_s = _LEAST_SHARE * abs(comparison.step_time.difference or 0.0)
    return [cause for cause in comparison.causes if cause.spans and cause.seconds > least_s][:_MOST_LABELS]


def _ranks(comparison: Comparison, named: Sequence[Cause]) -> list[int]:
    both = sorted({rank for trace in (comparison.predicted, comparison.measured) for rank in trace.ranks})
    if len(both) <= _MOST_RANKS:
        return both
    wanted = [span.rank for cause in named for span in cause.spans[:1]]
    firsts: dict[int | None, int] = {}
    for event in comparison.measured.events:
        if event.kind in COMPUTE:
            firsts[event.stage] = min(event.rank, firsts.get(event.stage, event.rank))
    return sorted(list(dict.fromkeys([*wanted, *sorted(firsts.values()), *both]))[:_MOST_RANKS])


def _bars(bars: Bars, side: int, which: str, rows: dict[int, int], per_second: float) -> go.Bar:
    style = palette.style_of(bars.kind)
    offset, height = _LANES[side][style.lane]
    has_text = side == 1 and style.lane == "compute"
    return go.Bar(
        orientation="h",
        name=style.label,
        y=[rows[rank] for rank in bars.ranks],
        base=[start * per_second for start in bars.starts_s],
        x=[duration * per_second for duration in bars.durations_s],
        offset=offset,
        width=height,
        opacity=_OPACITY[side],
        marker={"color": style.color, "line": {"color": "#ffffff", "width": 0.6}},
        text=bars.labels if has_text else None,
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        insidetextfont={"color": style.ink, "size": 11},
        hovertext=[f"{which}<br>{text}" for text in bars.hovers],
        hoverinfo="text",
        legendgroup=bars.kind,
        showlegend=side == 1,
    )


def _gaps(named: Sequence[Cause], rows: dict[int, int], window: Window, per_second: float) -> go.Bar:
    spans = [(cause, span) for cause in named for span in cause.spans if span.rank in rows]
    lengths_s = [span.end_s - span.start_s for _, span in spans]
    lanes = [_LANES[1]["communication" if cause.what == "collectives" else "compute"] for cause, _ in spans]
    return go.Bar(
        orientation="h",
        name="takes longer",
        y=[rows[span.rank] for _, span in spans],
        base=[(span.start_s - window.start_s) * per_second for _, span in spans],
        x=[length_s * per_second for length_s in lengths_s],
        offset=[offset for offset, _ in lanes],
        width=[height for _, height in lanes],
        marker={
            "color": "rgba(193,18,31,0.28)",
            "line": {"color": _GAP, "width": 1},
            "pattern": {"shape": "\\", "fgcolor": _GAP, "size": 5, "solidity": 0.25},
        },
        hovertext=[
            f"<b>rank {span.rank} · {duration_text(length_s)} longer</b><br>{cause.text}"
            for (cause, span), length_s in zip(spans, lengths_s, strict=True)
        ],
        hoverinfo="text",
        showlegend=bool(spans),
    )


def _dress(figure: go.Figure, comparison: Comparison, ranks: Sequence[int], end: float, unit: str) -> None:
    lines = textwrap.wrap(comparison.sentence, _SENTENCE_CHARACTERS)
    top = _TOP + _LINE * len(lines)
    height = top + _BOTTOM + max(_ROW_HEIGHT * len(ranks), _LEAST_HEIGHT)
    sides = zip(comparison.names, ("above", "below"), (comparison.predicted, comparison.measured), strict=True)
    notes = [f"{name} ({place}): {_numbers(trace)}" for name, place, trace in sides]
    if not (comparison.predicted.aligned and comparison.measured.aligned):
        notes.append("clocks are not aligned: compare bars within a rank only")
    palette.dress(figure, title=_title(comparison), notes=notes, height=height)
    text = figure.layout.title.text + "".join(f"<br><span style='font-size:13px'>{line}</span>" for line in lines)
    figure.update_layout(
        title={"text": text},
        barmode="overlay",
        bargap=0,
        uniformtext={"minsize": 8, "mode": "hide"},
        margin={"t": top, "b": _BOTTOM},
        legend={"y": -_TICKS / (height - top - _BOTTOM), "yanchor": "top"},
        hovermode="closest",
    )
    figure.update_xaxes(range=[0, end * 1.02], ticksuffix=f" {unit}", showticksuffix="last", ticks="outside")
    figure.update_yaxes(
        tickvals=list(range(len(ranks))),
        ticktext=[f"rank {rank}" for rank in ranks],
        range=[len(ranks) - 0.44, -0.56],
        showgrid=False,
        ticks="",
    )


def _mark_ends(figure: go.Figure, comparison: Comparison, windows: Sequence[Window], per_second: float) -> None:
    """A line where each step ends, and between them the difference."""
    ends = [window.span_s * per_second for window in windows]
    for end, dash in zip(ends, ("dot", "solid"), strict=True):
        line = {"color": palette.MUTED, "width": 1, "dash": dash}
        figure.add_shape(type="line", x0=end, x1=end, y0=0, y1=1, yref="paper", line=line)
    difference_s = comparison.step_time.difference or 0.0
    sign = "+" if difference_s > 0 else ""
    figure.add_annotation(
        x=max(ends),
        y=1,
        yref="paper",
        yanchor="bottom",
        xanchor="right",
        text=f"<b>{sign}{duration_text(difference_s)}</b>",
        showarrow=False,
        font={"size": 12, "color": _GAP if difference_s > 0 else palette.INK},
    )


def _label(figure: go.Figure, named: Sequence[Cause], rows: dict[int, int], window: Window, per_second: float) -> None:
    """Each gap's name below its longest stretch, on a row that has no name yet."""
    taken: set[int] = set()
    for cause in named:
        free = [span for span in cause.spans if span.rank in rows and span.rank not in taken]
        if not free:
            continue
        span = max(free, key=lambda one: (one.end_s - one.start_s, -one.rank))
        taken.add(span.rank)
        middle_s = (span.start_s + span.end_s) / 2 - window.start_s
        middle = middle_s / window.span_s if window.span_s else 0.0
        figure.add_annotation(
            x=middle_s * per_second,
            y=rows[span.rank] + _LABEL,
            text=f"{cause.text} · {'+' if cause.seconds > 0 else ''}{duration_text(cause.seconds)}",
            showarrow=False,
            xanchor="left" if middle < 0.25 else "right" if middle > 0.75 else "center",
            font={"size": 11, "color": _GAP},
        )


def _numbers(trace: Trace) -> str:
    return f"{duration_text(trace.step_time_s)}, bubble {percent_text(trace.bubble_fraction)}"


def _title(comparison: Comparison) -> str:
    first, second = comparison.names
    parts = [f"{first.capitalize()} and {second}"]
    plans = [trace.plan for trace in (comparison.predicted, comparison.measured) if trace.plan is not None]
    parts += list(dict.fromkeys(str(plan.layout) for plan in plans))
    if comparison.measured.pace is not None:
        parts.append("paced: durations as declared")
    return " · ".join(parts)
