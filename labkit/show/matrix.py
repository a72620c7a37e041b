"""Layouts against one rank, as a matrix: a row per layout, a column per optimizer and quantity."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import plotly.graph_objects as go

from labkit.errors import PlanError
from labkit.show import palette

__all__ = ["parity"]

ROW_HEIGHT = 30
FRAME_HEIGHT = 160
QUANTITIES = {"losses": "losses", "grad_norms": "gradient norms", "weights": "weights"}
# Between the optimizers, in columns.
GAP = 0.22


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """How a verdict is drawn: never by its colour alone, but also by the text in the cell."""

    color: str
    ink: str
    text: str = ""


STYLES = {
    "equal": _Style(color="#009E73", ink="#ffffff", text="="),
    "within rounding": _Style(color="#A8DCCB", ink=palette.INK),
    "different": _Style(color="#D55E00", ink="#ffffff"),
    "failed": _Style(color="#7A5195", ink="#ffffff", text="failed"),
    "not run": _Style(color="#DDE1E5", ink=palette.INK, text="not run"),
}


class HasComparisons(Protocol):
    """What `launch.parity` found, as far as this picture is concerned."""

    @property
    def entries(self) -> Sequence[Any]:
        """One per layout and optimizer: layout, optimizer, verdict, verdicts, differences, step, parameter, why."""

    @property
    def layouts(self) -> Sequence[Any]:
        """The rows."""

    @property
    def references(self) -> Sequence[Any]:
        """What one rank gave: layout, optimizer, clip_norm, num_clipped, grad_norms."""

    @property
    def num_steps(self) -> int:
        """How many steps were compared."""


def parity(result: HasComparisons) -> go.Figure:
    """Draw how far every layout is from one rank.

    A cell's colour is its verdict; its number is the power of ten of the largest difference: -7 for 10⁻⁷, which in fp32
    is the last bit.

    Raises:
        PlanError: `result` is not what `launch.parity` gave.
    """
    if not all(hasattr(result, name) for name in ("entries", "layouts", "references")):
        raise PlanError(
            f"a {type(result).__name__} holds no comparisons: this picture draws what lk.launch.parity returned."
        )
    rows = {layout: number for number, layout in enumerate(result.layouts)}
    optimizers = list(dict.fromkeys(entry.optimizer for entry in result.entries))
    figure = go.Figure()
    for verdict, style in STYLES.items():
        cells = [cell for entry in result.entries for cell in _cells(entry, optimizers) if cell.verdict == verdict]
        if cells:
            figure.add_trace(_bars(verdict, style, cells, rows))
    _dress(figure, result, rows, optimizers)
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    layout: Any
    x: float
    verdict: str
    text: str
    hover: str


def _cells(entry: Any, optimizers: Sequence[str]) -> list[_Cell]:
    start = optimizers.index(entry.optimizer) * (len(QUANTITIES) + GAP)
    return [
        _Cell(
            layout=entry.layout,
            x=start + number,
            verdict=entry.verdicts.get(quantity, entry.verdict),
            text=_text(entry, quantity),
            hover=_hover(entry, quantity),
        )
        for number, quantity in enumerate(QUANTITIES)
    ]


def _bars(verdict: str, style: _Style, cells: Sequence[_Cell], rows: Mapping[Any, int]) -> go.Bar:
    return go.Bar(
        name=verdict,
        orientation="h",
        base=[cell.x - 0.48 for cell in cells],
        x=[0.96] * len(cells),
        y=[rows[cell.layout] for cell in cells],
        width=0.88,
        text=[cell.text for cell in cells],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": style.ink, "size": 12},
        marker={"color": style.color, "line": {"width": 0}},
        hovertext=[cell.hover for cell in cells],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _text(entry: Any, quantity: str) -> str:
    if quantity not in entry.differences:
        return STYLES[entry.verdict].text
    difference = entry.differences[quantity]
    if difference == 0:
        return STYLES["equal"].text
    return "∞" if math.isinf(difference) else f"{math.log10(difference):.1f}".replace("-", "−")


def _hover(entry: Any, quantity: str) -> str:
    lines = [f"<b>{html.escape(str(entry.layout))}</b> · {entry.optimizer} · {QUANTITIES[quantity]}"]
    if quantity not in entry.differences:
        return "<br>".join([*lines, f"{entry.verdict}: {html.escape(entry.why[:200])}"])
    unit = "learning rates" if quantity == "weights" else "relative"
    band = getattr(entry.bands, quantity)
    lines.append(f"{entry.verdicts[quantity]}: {entry.differences[quantity]:.2e} ({unit}), band {band:g}")
    if entry.verdicts[quantity] == "different":
        lines.append(f"first outside in step {entry.step}, most in {html.escape(str(entry.parameter))}")
    return "<br>".join(lines)


def _dress(figure: go.Figure, result: HasComparisons, rows: Mapping[Any, int], optimizers: Sequence[str]) -> None:
    good = sum(all(entry.is_good for entry in result.entries if entry.layout == layout) for layout in rows)
    title = f"{good} of {len(rows)} layouts train as one rank does"
    notes = [f"{result.num_steps} steps", "log₁₀ of the largest difference; weights in learning rates"]
    palette.dress(figure, title=title, notes=notes, height=FRAME_HEIGHT + ROW_HEIGHT * len(rows))
    figure.update_layout(barmode="overlay", margin={"t": 116, "b": 44, "l": 24, "r": 24}, showlegend=True)
    figure.update_layout(
        legend={"traceorder": "normal", "yref": "container", "y": 0.0, "yanchor": "bottom", "itemclick": False},
        legend_itemdoubleclick=False,
    )
    step = len(QUANTITIES) + GAP
    ticks = [optimizer * step + number for optimizer in range(len(optimizers)) for number in range(len(QUANTITIES))]
    names = list(QUANTITIES.values()) * len(optimizers)
    figure.update_xaxes(
        side="top", tickvals=ticks, ticktext=names, range=[-0.55, ticks[-1] + 0.55 if ticks else 1], showgrid=False,
        ticks="", fixedrange=True,
    )  # fmt: skip
    figure.update_yaxes(
        tickvals=list(rows.values()), ticktext=[html.escape(str(layout)) for layout in rows], ticks="",
        range=[len(rows) - 0.4, -0.6], showgrid=False, automargin=True, ticklabelstandoff=8, fixedrange=True,
    )  # fmt: skip
    for number, optimizer in enumerate(optimizers):
        figure.add_annotation(
            x=number * step + 1, y=1, yref="paper", yshift=24, yanchor="bottom", showarrow=False,
            text=_heading(result, optimizer), font={"size": 13, "color": palette.INK},
        )  # fmt: skip


def _heading(result: HasComparisons, optimizer: str) -> str:
    """The optimizer, and in how many of all steps of its references clipping was active."""
    ones = [one for one in result.references if one.optimizer == optimizer]
    clipped = sum(one.num_clipped for one in ones)
    steps = sum(len(one.grad_norms) for one in ones)
    name = {"adamw": "AdamW", "sgd": "SGD"}.get(optimizer, optimizer)
    note = f"clipping active in {clipped} of {steps} steps"
    return f"<b>{name}</b> <span style='font-size:11px;color:{palette.MUTED}'>{note}</span>"
