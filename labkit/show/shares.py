"""What a step is made of, a bar for each layout: compute, bubble, and communication over each axis."""

import html
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from labkit.errors import PlanError
from labkit.show import palette
from labkit.show.units import duration_text

__all__ = ["shares"]

PARTS = {
    "compute_s": ("compute", "#0072B2"),
    "bubble_s": ("bubble", "#aab1ba"),
    "tp_s": ("tensor parallel", "#D55E00"),
    "pp_s": ("pipeline sends", "#56B4E9"),
    "dp_s": ("gradient sum", "#CC79A7"),
}
ROW_HEIGHT = 34
FRAME_HEIGHT = 190


def shares(rows: Mapping[str, Any], *, title: str, notes: str) -> go.Figure:
    """Draw simulated steps, shortest marked.

    Args:
        rows: name of a layout -> what `lk.predict.shares` gave.
        title: what is compared.
        notes: what was assumed; it stands on the picture.

    Raises:
        PlanError: nothing to draw, or values of another kind.
    """
    if not rows or not all(hasattr(one, part) for one in rows.values() for part in PARTS):
        raise PlanError("no shares to draw: give {name: lk.predict.shares(plan, hardware)}, at least one.")
    names = [html.escape(name) for name in rows]
    figure = go.Figure()
    for part, (label, color) in PARTS.items():
        seconds = [getattr(one, part) for one in rows.values()]
        figure.add_trace(
            go.Bar(
                name=label,
                orientation="h",
                y=names,
                x=seconds,
                marker={"color": color, "line": {"width": 0}},
                hovertext=[
                    f"<b>{name}</b><br>{label}: {duration_text(value)}"
                    for name, value in zip(names, seconds, strict=True)
                ],
                hovertemplate="%{hovertext}<extra></extra>",
                showlegend=any(seconds),
            )
        )
    best = min(one.step_s for one in rows.values())
    for name, one in zip(names, rows.values(), strict=True):
        text = duration_text(one.step_s)
        figure.add_annotation(
            x=one.step_s, y=name, text=f"<b>{text}</b>" if one.step_s == best else text, showarrow=False,
            xanchor="left", xshift=6, font={"color": palette.INK, "size": 12},
        )  # fmt: skip
    palette.dress(figure, title=title, notes=[f"simulated · {notes}"], height=FRAME_HEIGHT + ROW_HEIGHT * len(rows))
    longest = max(one.step_s for one in rows.values())
    figure.update_layout(barmode="stack", bargap=0.3, legend={"traceorder": "normal"}, margin={"t": 116})
    figure.update_xaxes(title={"text": "seconds a step"}, range=[0, longest * 1.14])
    figure.update_yaxes(autorange="reversed", automargin=True, ticklabelstandoff=8, showgrid=False)
    return figure
