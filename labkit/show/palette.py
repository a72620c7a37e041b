"""Colours and shape of every picture, in one place.

The colours are Okabe and Ito's, which people with any common colour blindness tell apart ("Color Universal Design",
2008): forward is blue, backward orange, and what belongs to a direction stays near its colour.
"""

from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go

INK = "#24292f"
MUTED = "#6a737d"
GRID = "#e8eaed"
IDLE = "#eceef1"
IDLE_HATCH = "#aab1ba"

RANK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5195", "#5B6770")

Lane = Literal["compute", "communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How events of one kind are drawn: compute in the upper lane of a row, communication in the lower one."""

    label: str
    color: str
    lane: Lane
    ink: str = INK


STYLES: dict[str, Style] = {
    "F": Style(label="forward", color="#0072B2", lane="compute", ink="#ffffff"),
    "B": Style(label="backward", color="#E69F00", lane="compute"),
    "I": Style(label="backward, inputs", color="#F2CC6B", lane="compute"),
    "W": Style(label="backward, weights", color="#A66F00", lane="compute", ink="#ffffff"),
    "optimizer": Style(label="optimizer", color="#009E73", lane="compute", ink="#ffffff"),
    "SEND_F": Style(label="send activation", color="#56B4E9", lane="communication"),
    "RECV_F": Style(label="receive activation", color="#B4DFF7", lane="communication"),
    "SEND_B": Style(label="send gradient", color="#D55E00", lane="communication", ink="#ffffff"),
    "RECV_B": Style(label="receive gradient", color="#F3B78F", lane="communication"),
    "all_reduce": Style(label="all-reduce", color="#CC79A7", lane="communication"),
    "reduce_scatter": Style(label="reduce-scatter", color="#8E4A78", lane="communication", ink="#ffffff"),
    "all_gather": Style(label="all-gather", color="#7A5195", lane="communication", ink="#ffffff"),
    "broadcast": Style(label="broadcast", color="#C9B800", lane="communication"),
    "wait": Style(label="wait", color="#9AA3AD", lane="communication"),
}

# Kinds that say something about a rank without being a bar.
NOT_BARS = frozenset({"memory", "step"})


def style_of(kind: str) -> Style:
    """The style of a kind; one this table does not know is drawn in the lower lane, under its own name."""
    return STYLES.get(kind, Style(label=kind, color="#5B6770", lane="communication", ink="#ffffff"))


def rank_color(index: int, num_ranks: int) -> str:
    """A colour for one rank: eight apart by hue; among more, a scale from blue to orange by rank."""
    if num_ranks <= len(RANK_COLORS):
        return RANK_COLORS[index]
    share = index / (num_ranks - 1)
    start, end = (0, 114, 178), (230, 159, 0)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(start, end, strict=True))
    return f"rgb({red},{green},{blue})"


def dress(figure: go.Figure, *, title: str, notes: list[str], height: int) -> go.Figure:
    """Give a figure the house's fonts, margins, title and a line of notes under it."""
    text = f"<b>{title}</b>"
    if notes:
        text += f"<br><span style='font-size:12px;color:{MUTED}'>{' · '.join(notes)}</span>"
    figure.update_layout(
        title={"text": text, "x": 0, "xref": "container", "pad": {"l": 16}, "font": {"size": 16, "color": INK}},
        title_y=1,
        title_yanchor="top",
        title_pad_t=20,
        height=height,
        margin={"l": 72, "r": 28, "t": 98, "b": 48},
        font={"family": "Inter, system-ui, Segoe UI, Helvetica, Arial, sans-serif", "size": 12, "color": INK},
        plot_bgcolor="#ffffff",
        paper_bgcolor="#ffffff",
        hoverlabel={"bgcolor": "#ffffff", "bordercolor": GRID, "align": "left", "font": {"size": 12, "color": INK}},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "font": {"size": 11}},
    )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID, "tickcolor": GRID, "title_standoff": 8}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure
