"""The bubbles of several schedules, predicted and measured side by side."""

from collections.abc import Mapping

import plotly.graph_objects as go

from labkit.errors import PlanError
from labkit.show import palette
from labkit.trace import Trace

__all__ = ["bubbles"]

_ROW_HEIGHT, _AROUND = 44, 150


def bubbles(traces: Mapping[str, tuple[Trace, Trace]]) -> go.Figure:
    """Draw two bars for each schedule: the idle share of a step as predicted and as measured.

    Args:
        traces: `{name: (predicted, measured)}`, drawn from top to bottom.

    Raises:
        PlanError: nothing to draw.
    """
    if not traces:
        raise PlanError("there are 0 schedules to draw: give 1 or more, {name: (predicted, measured)}.")
    names = list(traces)
    figure = go.Figure()
    for index, (which, color) in enumerate((("predicted", palette.GRID), ("measured", palette.RANK_COLORS[0]))):
        shares = [100 * pair[index].bubble_fraction for pair in traces.values()]
        figure.add_trace(
            go.Bar(
                name=which,
                orientation="h",
                y=names,
                x=shares,
                marker={"color": color, "line": {"color": palette.MUTED, "width": 1 if which == "predicted" else 0}},
                text=[f"{share:.1f} %" for share in shares],
                textposition="outside",
                cliponaxis=False,
                hovertemplate=f"%{{y}}: %{{x:.2f}} %<extra>{which}</extra>",
            )
        )
    palette.dress(figure, title="The idle share of a step", notes=[], height=_AROUND + _ROW_HEIGHT * len(names))
    width = 7 * max(map(len, names))
    figure.update_layout(bargap=0.25, margin={"l": 24 + width, "t": 72}, legend={"traceorder": "normal"})
    figure.update_xaxes(title={"text": "bubble, per cent of the ranks' time"}, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", ticks="")
    return figure
