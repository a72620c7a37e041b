"""A change of layout as a matrix: which bytes go from which rank to which, and what every rank has already."""

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labkit.errors import PlanError
from labkit.show import palette
from labkit.show.units import traffic_text

__all__ = ["switch"]

CELL = 46
FRAME_HEIGHT = 150
MOST_ROWS = 16
MOST_LABELS = 8
"""Ranks up to which every cell carries its number; beyond, only hovering tells."""

SENT = ((0.0, "#e6f1f8"), (1.0, "#0072B2"))
STAYS = "#eceef1"


def switch(given: Any) -> go.Figure:
    """Draw what a change of layout sends from rank to rank.

    Rows send, columns receive. Grey on the diagonal is what a rank holds already and keeps.

    Args:
        given: what `lk.plan.moves` or `lk.launch.switch` returned.

    Raises:
        PlanError: `given` is neither.
    """
    found = getattr(given, "moves", given)
    if not all(hasattr(found, name) for name in ("matrix", "num_bytes", "before", "after")):
        raise PlanError(
            f"a {type(given).__name__} says no moves: this picture draws what lk.plan.moves or lk.launch.switch gave."
        )
    matrix = found.matrix
    size = len(matrix)
    most = max((matrix[a][b] for a in range(size) for b in range(size) if a != b), default=0)
    figure = go.Figure()
    figure.add_trace(_cells(matrix, most, name="goes", colors=SENT, own=False))
    figure.add_trace(_cells(matrix, most, name="stays", colors=((0.0, STAYS), (1.0, STAYS)), own=True))
    stays = sum(matrix[rank][rank] for rank in range(size))
    notes = [
        f"{traffic_text(found.num_bytes)} from rank to rank" if found.num_bytes else "nothing goes from rank to rank",
        f"{traffic_text(stays)} stay where they are",
    ]
    title = f"{html.escape(str(found.before.layout))} → {html.escape(str(found.after.layout))}"
    palette.dress(figure, title=title, notes=notes, height=FRAME_HEIGHT + CELL * min(size, MOST_ROWS))
    ticks = list(range(0, size, -(-size // MOST_ROWS)))
    axis = {"tickvals": ticks, "showgrid": False, "ticks": "", "fixedrange": True}
    figure.update_layout(margin={"t": 76, "b": 44})
    figure.update_xaxes(title="to rank", range=[-0.5, size - 0.5], **axis)
    figure.update_yaxes(title="from rank", range=[size - 0.5, -0.5], **axis)
    return figure


def _cells(
    matrix: Sequence[Sequence[int]], most: int, *, name: str, colors: tuple[tuple[float, str], ...], own: bool
) -> go.Heatmap:
    """The diagonal, or all cells but it."""
    size = len(matrix)
    values = [[matrix[a][b] if matrix[a][b] and (a == b) == own else None for b in range(size)] for a in range(size)]
    has_labels = size <= MOST_LABELS
    return go.Heatmap(
        name=name,
        z=values,
        zmin=0,
        zmax=most or 1,
        colorscale=colors,
        showscale=False,
        hoverongaps=False,
        xgap=2,
        ygap=2,
        text=[[_label(value) if has_labels else "" for value in row] for row in values],
        texttemplate="%{text}",
        textfont={"size": 12},
        customdata=[[_hover(a, b, matrix[a][b]) for b in range(size)] for a in range(size)],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _label(value: int | None) -> str:
    return "" if value is None else traffic_text(float(f"{value:.3g}"))


def _hover(source: int, target: int, num_bytes: int) -> str:
    if source == target:
        return f"rank {source} has {traffic_text(num_bytes)} of its part already"
    return f"rank {target} takes {traffic_text(num_bytes)} from rank {source}"
