"""Amounts made of parts, as stacked bars: bytes by what they are for, times by what they go into."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.errors import PlanError
from labkit.show import palette

__all__ = ["stacked"]

Bars = Mapping[str, Mapping[str, float]]

_HEIGHT, _ABOVE = 420, 1.12
_LEGEND_Y = -0.12


def stacked(
    panels: Mapping[str, Bars],
    *,
    title: str,
    unit: str,
    notes: Sequence[str] = (),
    limit: tuple[str, float] | None = None,
    marks: tuple[str, Mapping[str, float]] | None = None,
) -> go.Figure:
    """Draw a bar for each amount, one part upon the other, and its sum above it.

    Args:
        panels: `{panel: {bar: {part: amount}}}`; panels stand side by side on one scale, a panel's name above it.
        title: what all of it is.
        unit: of every amount; the axis's name.
        notes: what a reader must know, below the title.
        limit: a dashed line through all panels: its name and its amount.
        marks: a short line at each bar of that name: what they mean, and `{bar: amount}`.

    Raises:
        PlanError: no bar to draw.
    """
    if not any(bars for bars in panels.values()):
        raise PlanError(f"{len(panels)} panels have 0 bars: there is nothing to draw. Give {{panel: {{bar: parts}}}}.")
    names = list(panels)
    figure = make_subplots(
        cols=len(names), shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=names if any(names) else None
    )
    parts = list(dict.fromkeys(part for bars in panels.values() for held in bars.values() for part in held))
    top = 0.0
    for column, bars in enumerate(panels.values(), start=1):
        for index, part in enumerate(parts):
            figure.add_trace(_part(part, index, bars, unit, named=column == 1), row=1, col=column)
        totals = [sum(held.values()) for held in bars.values()]
        top = max(top, *totals)
        figure.add_trace(_sums(list(bars), totals), row=1, col=column)
        if marks is not None:
            figure.add_trace(_marks(marks[0], marks[1], list(bars), named=column == 1), row=1, col=column)
    palette.dress(figure, title=title, notes=list(notes), height=_HEIGHT)
    if limit is not None:
        _draw_limit(figure, *limit)
    figure.update_layout(barmode="stack", legend={"y": _LEGEND_Y, "yanchor": "top", "traceorder": "normal"})
    figure.update_yaxes(range=[0, _ABOVE * max(top, *(marks[1].values() if marks else [0.0]))])
    figure.update_yaxes(title={"text": unit}, col=1)
    return figure


def _part(part: str, index: int, bars: Bars, unit: str, *, named: bool) -> go.Bar:
    return go.Bar(
        name=part,
        x=list(bars),
        y=[held.get(part, 0.0) for held in bars.values()],
        marker={"color": palette.RANK_COLORS[index % len(palette.RANK_COLORS)]},
        legendgroup=part,
        showlegend=named,
        hovertemplate=f"%{{x}}: %{{y:.4g}} {unit}<extra>{part}</extra>",
    )


def _sums(names: list[str], totals: list[float]) -> go.Scatter:
    return go.Scatter(
        x=names,
        y=totals,
        mode="text",
        text=[f"{total:,.0f}" if total >= 1000 else f"{total:.3g}" for total in totals],
        textposition="top center",
        showlegend=False,
        hoverinfo="skip",
    )


def _marks(name: str, amounts: Mapping[str, float], bars: list[str], *, named: bool) -> go.Scatter:
    marked = [bar for bar in bars if bar in amounts]
    return go.Scatter(
        name=name,
        x=marked,
        y=[amounts[bar] for bar in marked],
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 44, "color": palette.INK, "line": {"width": 2}},
        legendgroup=name,
        showlegend=named,
        hovertemplate=f"%{{x}}: %{{y:.4g}}<extra>{name}</extra>",
    )


def _draw_limit(figure: go.Figure, name: str, amount: float) -> None:
    figure.add_hline(y=amount, line={"dash": "dash", "color": palette.MUTED}, row="all", col="all")
    figure.add_annotation(
        text=name,
        x=1,
        xref="x domain",
        y=amount,
        xanchor="right",
        yanchor="bottom",
        showarrow=False,
        font={"color": palette.MUTED},
        row=1,
        col=1,
    )
