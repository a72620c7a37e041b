"""A ring all-reduce among more and more ranks: what each sends saturates, how often it waits does not."""

import math
from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.errors import PlanError
from labkit.show import palette

__all__ = ["ring"]


def ring(most_ranks: int = 1024, *, measured: Mapping[int, float] | None = None) -> go.Figure:
    """Draw bytes a rank sends, in units of the tensor, and messages one after the other, of a ring and of a tree.

    Args:
        most_ranks: how far the curves go, in powers of two.
        measured: ranks -> bytes that one of them sent, in units of the tensor; drawn as points.

    Raises:
        PlanError: fewer than 4 ranks.
    """
    if most_ranks < 4:
        raise PlanError(f"most_ranks={most_ranks} shows no trend: curves begin at 2 ranks. Use 1024.")
    ranks = [2**power for power in range(1, int(math.log2(most_ranks)) + 1)]
    titles = ["bytes a rank sends, in tensors", "messages that wait for each other"]
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    blue, orange = palette.RANK_COLORS[:2]
    sent = [2 * (n - 1) / n for n in ranks]
    figure.add_trace(_curve("ring, by formula", ranks, sent, blue), row=1, col=1)
    if measured:
        points = {
            "color": palette.RANK_COLORS[5],
            "size": 12,
            "symbol": "x-thin",
            "line": {"width": 3, "color": palette.RANK_COLORS[5]},
        }
        figure.add_trace(
            go.Scatter(
                name="ring, counted on ranks", x=list(measured), y=list(measured.values()),
                mode="markers", marker=points,
            ),
            row=1, col=1,
        )  # fmt: skip
    figure.add_hline(y=2, line={"color": palette.MUTED, "dash": "dot", "width": 1.5}, row=1, col=1)
    figure.add_trace(_curve("ring: 2 (N − 1)", ranks, [2 * (n - 1) for n in ranks], blue, dash="dash"), row=1, col=2)
    figure.add_trace(_curve("tree: 2 log₂ N", ranks, [2 * math.log2(n) for n in ranks], orange), row=1, col=2)
    notes = ["by formula" + (", with points counted on these ranks" if measured else "")]
    figure.update_annotations(font_size=13)
    palette.dress(figure, title="An all-reduce among N ranks", notes=notes, height=360)
    figure.update_layout(margin={"t": 128}, legend={"y": 1.1})
    figure.update_xaxes(type="log", tickvals=ranks[:: 1 if len(ranks) < 7 else 2], title={"text": "ranks"})
    figure.update_yaxes(range=[0, 2.2], col=1)
    figure.update_yaxes(type="log", dtick=1, col=2)
    return figure


def _curve(name: str, x: list[int], y: list[float], color: str, dash: str = "solid") -> go.Scatter:
    return go.Scatter(name=name, x=x, y=y, mode="lines", line={"color": color, "width": 2.5, "dash": dash})
