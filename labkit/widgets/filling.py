"""One live figure, filled again and again from figures that `show` draws."""

from typing import Any

import plotly.graph_objects as go


def live_figure(figure: go.Figure) -> go.FigureWidget:
    """A figure in the page that `fill` can update."""
    widget = go.FigureWidget(figure)
    widget.layout.autosize = True
    return widget


def fill(widget: go.FigureWidget, figure: go.Figure) -> None:
    """Make the live figure show what `figure` shows, in one message to the page where the traces pair up."""
    if len(widget.data) != len(figure.data):
        widget.data = ()
        widget.add_traces(list(figure.data))
    with widget.batch_update():
        for mine, theirs in zip(widget.data, figure.data, strict=True):
            mine.update(theirs.to_plotly_json())
        widget.layout.update(_without_template(figure))
        for parts in ("annotations", "shapes"):
            widget.layout[parts] = figure.layout[parts]


def _without_template(figure: go.Figure) -> dict[str, Any]:
    """The figure's layout less the parts that never change, whose comparison would take most of the time."""
    layout: dict[str, Any] = figure.layout.to_plotly_json()
    return {name: value for name, value in layout.items() if name not in ("template", "annotations", "shapes")}
