"""Where ranks live: hosts and their ranks, once for each axis, coloured by the groups that talk to each other."""

import html
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.predict import INNER_TO_OUTER, groups_in_order, num_hosts
from labkit.show import palette
from labkit.spec.checks import whole

__all__ = ["hosts"]

MOST_RANKS = 256
MOST_NUMBERED = 64
ROW_HEIGHT = 34
UNUSED = "#aab1ba"
FRAME_HEIGHT = 150


def hosts(plan: Plan, ranks_per_host: int, *, order: Sequence[str] = INNER_TO_OUTER) -> go.Figure:
    """Draw which ranks form a group on each axis, and whether the group stays within a host.

    A row is a host, a square a rank; neighbouring groups have different colours, and the group of rank 0 is outlined.
    Nothing is measured: ranks fill hosts one after the other.

    Args:
        plan: the plan.
        ranks_per_host: ranks on each host.
        order: the axes from innermost to outermost; the lab's ranks are in the order that stands here already.

    Raises:
        PlanError: no plan, more than 256 ranks, or an order that has not each axis once.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"a {type(plan).__name__} is no Plan: this picture draws what lk.plan.build gave.")
    width, size = whole("ranks_per_host", ranks_per_host), plan.world_size
    if size > MOST_RANKS:
        raise PlanError(
            f"{size} ranks are more than {MOST_RANKS}: the picture has a square for each. Draw fewer hosts."
        )
    reach = {axis: num_hosts(plan, axis, width, order) for axis in order}
    titles = [_panel_title(axis, getattr(plan.layout, axis), reach[axis]) for axis in order]
    figure = make_subplots(rows=1, cols=len(order), subplot_titles=titles, horizontal_spacing=0.05)
    for column, axis in enumerate(order, start=1):
        groups = groups_in_order(plan, axis, order)
        figure.add_trace(_squares(groups, plan, width, axis, order), row=1, col=column)
    rows = -(-size // width)
    notes = [
        f"{size} ranks on {rows} hosts of {width}",
        f"ranks go along {', then '.join(order)}",
        "computed, not measured",
    ]
    palette.dress(
        figure,
        title=f"Groups and hosts · {html.escape(str(plan.layout))}",
        notes=notes,
        height=FRAME_HEIGHT + ROW_HEIGHT * max(rows, 2),
    )
    figure.update_annotations(font_size=13)
    figure.update_layout(margin={"t": 104, "b": 24, "l": 64}, showlegend=False)
    figure.update_xaxes(visible=False, range=[-0.6, min(width, size) - 0.4], fixedrange=True)
    figure.update_yaxes(
        range=[rows - 0.4, -0.6],
        showgrid=False,
        showline=False,
        ticks="",
        fixedrange=True,
        tickvals=list(range(rows)),
        showticklabels=False,
    )
    figure.update_yaxes(ticktext=[f"host {row}" for row in range(rows)], showticklabels=True, col=1)
    return figure


def _panel_title(axis: str, degree: int, reach: int) -> str:
    name = {"tp": "tensor parallel", "dp": "data parallel", "pp": "pipeline"}[axis]
    if degree == 1:
        return f"<b>{name}</b> · not used"
    where = "within a host" if reach == 1 else f"<b>across {reach} hosts</b>"
    return f"<b>{name} {degree}</b> · {where}"


def _squares(groups: Sequence[Sequence[int]], plan: Plan, width: int, axis: str, order: Sequence[str]) -> go.Scatter:
    members = [(rank, number) for number, group in enumerate(groups) for rank in group]
    cycle = palette.RANK_COLORS
    is_used = len(groups[0]) > 1
    colors = [cycle[number % len(cycle)] if is_used else UNUSED for _, number in members]
    outlines = [3 if number == 0 and is_used else 0 for _, number in members]
    is_numbered = plan.world_size <= MOST_NUMBERED
    return go.Scatter(
        x=[rank % width for rank, _ in members],
        y=[rank // width for rank, _ in members],
        mode="markers+text" if is_numbered else "markers",
        marker={
            "symbol": "square",
            "size": 24 if is_numbered else 12,
            "color": colors,
            "line": {"width": outlines, "color": palette.INK},
        },
        text=[str(rank) for rank, _ in members],
        textfont={"color": "#ffffff", "size": 11},
        hovertext=[_hover(rank, plan, axis, groups[number], order) for rank, number in members],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover(rank: int, plan: Plan, axis: str, group: Sequence[int], order: Sequence[str]) -> str:
    places, rest = [], rank
    for each in order:
        rest, place = divmod(rest, getattr(plan.layout, each))
        places.append(f"{each} {place}")
    shown = ", ".join(map(str, group[:12])) + (", …" if len(group) > 12 else "")
    return f"<b>rank {rank}</b> · {' · '.join(places)}<br>talks over {axis} to ranks {shown}"
