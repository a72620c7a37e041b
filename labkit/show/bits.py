"""Floating-point numbers drawn bit by bit, and formats by what they can hold."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from labkit.errors import PlanError
from labkit.formats import FORMATS, Format, Number
from labkit.show import palette
from labkit.spec.checks import shown

__all__ = ["bits", "ranges"]

SIGN, EXPONENT, MANTISSA = "#5B6770", "#0072B2", "#E69F00"
ROW_HEIGHT = 44
FRAME_HEIGHT = 150
MOST_ROWS = 40
# Room for values and formulas to the right of the bits, in bits.
TEXT_BITS = 13.5


def bits(numbers: Number | Sequence[Number]) -> go.Figure:
    """Draw numbers bit by bit, aligned at the point: exponents end there, mantissas begin.

    Args:
        numbers: what `lk.formats` decoded or rounded, of one format or of several.

    Raises:
        PlanError: something in it is no such number, or there are none or more than 40.
    """
    rows = _numbers(numbers)
    figure = go.Figure()
    for part, (name, color, ink) in enumerate(
        (("sign", SIGN, "#ffffff"), ("exponent", EXPONENT, "#ffffff"), ("mantissa", MANTISSA, palette.INK))
    ):
        figure.add_trace(_boxes(rows, part, name, color, ink))
    left = max(row.format.exponent_bits for row in rows) + 1
    right = max(row.format.mantissa_bits for row in rows)
    for index, row in enumerate(rows):
        figure.add_annotation(
            x=right + 0.4, y=index, xanchor="left", showarrow=False, align="left", font={"size": 13},
            text=f"<b>{row.value:.9g}</b><br><span style='font-size:11px;color:{palette.MUTED}'>{_formula(row)}</span>",
        )  # fmt: skip
    notes = ["the value is 2^(exponent - bias) x (1 + mantissa)"]
    palette.dress(figure, title="Bit by bit", notes=notes, height=FRAME_HEIGHT + ROW_HEIGHT * len(rows))
    figure.update_layout(barmode="overlay", margin={"b": 16}, legend={"traceorder": "normal", "itemclick": False})
    figure.update_xaxes(range=[-left - 0.6, right + TEXT_BITS], visible=False, fixedrange=True)
    figure.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=[row.format.name for row in rows], range=[len(rows) - 0.4, -0.6],
        showgrid=False, ticks="", fixedrange=True, tickfont={"size": 13},
    )  # fmt: skip
    return figure


def ranges(formats: Sequence[Format] | None = None) -> go.Figure:
    """Draw what formats can hold: from the smallest number to the largest, on an axis of powers of two.

    Where a bar is pale, numbers lose one bit of mantissa with each power of two to the left.

    Args:
        formats: of `lk.formats`; None: all of them.
    """
    drawn = list(FORMATS.values() if formats is None else formats)
    for one in drawn:
        if not isinstance(one, Format):
            raise PlanError(f"{shown(one)} is no format: take them from lk.formats, such as lk.formats.BF16.")
    figure = go.Figure()
    for name, color, ends in (
        ("all bits of mantissa", EXPONENT, [(one.smallest_normal, one.largest) for one in drawn]),
        ("fewer with each power of two", "#B4DFF7", [(one.smallest, one.smallest_normal) for one in drawn]),
    ):
        figure.add_bar(
            name=name,
            orientation="h",
            base=[math.log2(low) for low, _ in ends],
            x=[math.log2(high) - math.log2(low) for low, high in ends],
            y=list(range(len(drawn))),
            width=0.5,
            marker={"color": color},
            hovertext=[f"{low:.4g} to {high:.4g}" for low, high in ends],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    for index, one in enumerate(drawn):
        for value, anchor, sign in ((one.smallest, "right", -1), (one.largest, "left", 1)):
            figure.add_annotation(
                x=math.log2(value), y=index, xshift=6 * sign, xanchor=anchor, showarrow=False, text=_size_text(value),
                font={"size": 12},
            )  # fmt: skip
    notes = ["positive numbers, smallest to largest"]
    palette.dress(figure, title="What a format can hold", notes=notes, height=FRAME_HEIGHT + 40 + 42 * len(drawn))
    figure.update_layout(barmode="overlay", legend={"traceorder": "normal", "itemclick": False})
    figure.update_xaxes(title={"text": "power of two"}, range=[-190, 160], dtick=32, tick0=0)
    figure.update_yaxes(
        tickvals=list(range(len(drawn))), ticktext=[_format_text(one) for one in drawn], range=[len(drawn) - 0.4, -0.6],
        showgrid=False, ticks="", automargin=True, ticklabelstandoff=8, tickfont={"size": 13},
    )  # fmt: skip
    return figure


def _numbers(numbers: Number | Sequence[Number]) -> list[Number]:
    rows = [numbers] if isinstance(numbers, Number) else list(numbers)
    for row in rows:
        if not isinstance(row, Number):
            raise PlanError(
                f"{shown(row)} is no number of a format: round it to one, as lk.formats.BF16.nearest(...) does."
            )
    if not 0 < len(rows) <= MOST_ROWS:
        raise PlanError(f"{len(rows)} numbers are given: 1 to {MOST_ROWS} fit into a picture.")
    return rows


def _boxes(rows: Sequence[Number], part: int, name: str, color: str, ink: str) -> go.Bar:
    """One box for each bit of a part: 0 the sign, 1 the exponent, 2 the mantissa."""
    places: list[tuple[float, int, str]] = []
    for index, row in enumerate(rows):
        start = (-row.format.exponent_bits - 1.35, -row.format.exponent_bits - 0.15, 0.15)[part]
        places += [(start + place, index, bit) for place, bit in enumerate(row.bits[part])]
    return go.Bar(
        name=name,
        orientation="h",
        base=[x + 0.04 for x, _, _ in places],
        x=[0.92] * len(places),
        y=[y for _, y, _ in places],
        width=0.62,
        text=[bit for _, _, bit in places],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": ink, "size": 12, "family": "ui-monospace, Menlo, Consolas, monospace"},
        marker={"color": color, "line": {"width": 0}, "opacity": [1.0 if bit == "1" else 0.55 for _, _, bit in places]},
        hoverinfo="skip",
    )


def _formula(number: Number) -> str:
    return "" if number.kind in ("zero", "infinite", "nan") else number.formula


def _format_text(one: Format) -> str:
    return f"{one.name}  <span style='color:{palette.MUTED}'>1 + {one.exponent_bits} + {one.mantissa_bits} bits</span>"


def _size_text(value: float) -> str:
    return f"{value:.0f}" if 100 < value < 1e6 else f"{value:.3g}"
