"""What casts to FP8 do, layer by layer and step by step."""

import html
import math
from collections.abc import Sequence
from typing import Any, Protocol

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.errors import PlanError
from labkit.show import palette
from labkit.spec.checks import choice
from labkit.spec.fp8 import ROLES
from labkit.trace.fp8 import PRODUCTS, Fp8Cast, Fp8Record

__all__ = ["fp8"]

QUANTITIES = ("underflow", "saturation", "error", "amax", "scale")

_TITLES = {
    "underflow": "values that became 0",
    "saturation": "values cut off at the top",
    "error": "error of the product against bf16",
    "amax": "largest magnitude (amax)",
    "scale": "scale",
}
_IS_SHARE = {"underflow", "saturation", "error"}
ROW_HEIGHT = 16
FRAME_HEIGHT = 186
_MOST_LABELS = 30


class HasFp8(Protocol):
    """A run, as far as this picture is concerned."""

    @property
    def fp8(self) -> Fp8Record:
        """What its casts did."""


def fp8(run: HasFp8 | Fp8Record, quantity: str = "underflow") -> go.Figure:
    """Draw a quantity of every FP8 tensor: a row per matrix, a column per step, one map for each of the three roles.

    Args:
        run: a run with `record_fp8=True`, or its `fp8`.
        quantity: "underflow", "saturation", "error", "amax" or "scale"; shares and errors in per cent, amax and scale
            in powers of two.

    Raises:
        PlanError: nothing was recorded, or no such quantity.
    """
    record = _record_of(run)
    choice("quantity", quantity, QUANTITIES)
    rows = record.matrices
    figure = make_subplots(cols=len(ROLES), shared_yaxes=True, horizontal_spacing=0.03)
    maps = [_values(record, role, quantity, rows) for role in ROLES]
    finite = [value for one in maps for line in one for value in line if value is not None]
    low, high = _range(quantity, finite)
    for column, role in enumerate(ROLES, start=1):
        figure.add_trace(
            _map(record, role, quantity, rows, maps[column - 1], low, high, column == 1), row=1, col=column
        )
    _dress(figure, record, quantity, rows)
    return figure


def _record_of(run: Any) -> Fp8Record:
    record = run if isinstance(run, Fp8Record) else getattr(run, "fp8", None)
    if not isinstance(record, Fp8Record):
        raise PlanError(
            f"a {type(run).__name__} holds nothing on FP8: this picture draws a run with record_fp8=True, or its fp8."
        )
    if not record.casts:
        raise PlanError("nothing is recorded yet: this picture draws steps that are over. Wait for the first one.")
    return record


def _values(record: Fp8Record, role: str, quantity: str, rows: Sequence[str]) -> list[list[float | None]]:
    """A line per matrix, a value per step."""
    steps = {step: number for number, step in enumerate(record.steps)}
    lines: dict[str, list[float | None]] = {name: [None] * len(steps) for name in rows}
    for cast in record.of(role=role):
        lines[f"{cast.layer} {cast.matrix}"][steps[cast.step]] = _shown(cast, quantity)
    return list(lines.values())


def _shown(cast: Fp8Cast, quantity: str) -> float | None:
    value: float = getattr(cast, quantity)
    if not math.isfinite(value):
        return None
    if quantity in _IS_SHARE:
        return 100.0 * value
    return math.log2(value) if value > 0 else None


def _range(quantity: str, finite: Sequence[float]) -> tuple[float, float]:
    if not finite:
        return 0.0, 1.0
    if quantity in _IS_SHARE:
        return 0.0, max(max(finite), 1e-3)
    return math.floor(min(finite)), math.ceil(max(finite))


def _map(
    record: Fp8Record,
    role: str,
    quantity: str,
    rows: Sequence[str],
    values: list[list[float | None]],
    low: float,
    high: float,
    has_scale: bool,
) -> go.Heatmap:
    unit = "%{z:.3g} %" if quantity in _IS_SHARE else "2^%{z:.1f}"
    what = f"{_TITLES[quantity]}" if quantity != "error" else f"error of the {PRODUCTS[role]}"
    return go.Heatmap(
        x=list(record.steps),
        y=list(range(len(rows))),
        z=values,
        zmin=low,
        zmax=high,
        colorscale=[[0.0, "#f4f6f8"], [0.25, "#B4DFF7"], [0.6, "#0072B2"], [1.0, "#3b0f4d"]],
        showscale=has_scale,
        colorbar={"title": {"text": "%" if quantity in _IS_SHARE else "log₂"}, "thickness": 12, "outlinewidth": 0},
        customdata=[[html.escape(name)] * len(record.steps) for name in rows],
        hovertemplate=f"<b>%{{customdata}}</b>, {role}<br>step %{{x}}<br>{what}: {unit}<extra></extra>",
        xgap=1 if len(record.steps) <= 60 else 0,
        ygap=1,
    )


def _dress(figure: go.Figure, record: Fp8Record, quantity: str, rows: Sequence[str]) -> None:
    recipe = record.recipe
    title = f"FP8: {_TITLES[quantity]}"
    largest = max(record.casts, key=lambda cast: -math.inf if math.isnan(v := getattr(cast, quantity)) else v)
    value = getattr(largest, quantity)
    text = f"{100 * value:.3g} %" if quantity in _IS_SHARE else f"{value:.3g}"
    of = PRODUCTS[largest.role] if quantity == "error" else largest.role
    notes = [
        f"{recipe.recipe} scaling, {'E4M3 and E5M2 for gradients' if recipe.format == 'hybrid' else 'E4M3'}",
        f"largest: {text}, {of} of {largest.matrix} in layer {largest.layer}, step {largest.step}",
    ]
    palette.dress(figure, title=title, notes=notes, height=FRAME_HEIGHT + ROW_HEIGHT * len(rows))
    figure.update_layout(margin={"t": 96, "l": 24, "r": 24, "b": 48})
    for column, role in enumerate(ROLES, start=1):
        form = recipe.format_of(role).upper()
        head = f"<b>{role}</b> · {form}" if quantity != "error" else f"<b>{PRODUCTS[role]}</b>"
        figure.add_annotation(
            x=0, xref="x domain" if column == 1 else f"x{column} domain", y=1, yref="paper", yshift=6, yanchor="bottom",
            xanchor="left", showarrow=False, text=head, font={"size": 13, "color": palette.INK},
        )  # fmt: skip
    every = -(-len(rows) // _MOST_LABELS)
    figure.update_xaxes(title={"text": "step"}, showgrid=False)
    figure.update_yaxes(showgrid=False, range=[len(rows) - 0.5, -0.5], tickvals=list(range(0, len(rows), every)))
    figure.update_yaxes(
        ticktext=[html.escape(name) for name in rows[::every]], automargin=True, tickfont={"size": 11}, row=1, col=1
    )
