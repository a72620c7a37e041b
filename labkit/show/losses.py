"""Loss by step for one run or several, drawn so that equal curves are seen to be equal."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import plotly.graph_objects as go

from labkit.show import palette


class HasLosses(Protocol):
    """A run, as far as this picture is concerned."""

    @property
    def losses(self) -> Sequence[float]:
        """One loss per step."""

    @property
    def plan(self) -> Any:
        """What was run; its layout names the curve."""


Curve = HasLosses | Sequence[float]


def losses(
    runs: Curve | Sequence[HasLosses] | Mapping[str, Curve], *, changes: Mapping[int, str] | None = None
) -> go.Figure:
    """Draw loss curves; where two coincide, the later one is the thinner line on top of the wider.

    Args:
        runs: a run, several runs (each named by its layout), or `{label: run or list of losses}`.
        changes: steps before which something changed while training went on, and what: each is marked.
    """
    curves = named_curves(runs)
    figure = go.Figure()
    for index, (name, values) in enumerate(curves.items()):
        color = palette.RANK_COLORS[index % len(palette.RANK_COLORS)]
        width = max(2.0, 2.0 + 3.0 * (len(curves) - 1 - index))
        figure.add_trace(
            go.Scatter(
                name=name,
                x=list(range(len(values))),
                y=values,
                mode="lines+markers",
                line={"color": color, "width": width},
                marker={"color": color, "size": width + 4},
                hovertemplate="<b>%{fullData.name}</b><br>step %{x}<br>loss %{y:.6f}<extra></extra>",
                showlegend=len(curves) > 1,
            )
        )
    longest = max((len(values) for values in curves.values()), default=0)
    if longest == 0:
        figure.add_annotation(text="no step yet", showarrow=False, font={"color": palette.MUTED, "size": 14})
    palette.dress(figure, title=_title(curves), notes=_notes(curves), height=340)
    figure.update_xaxes(
        title={"text": "step"}, dtick=max(1, -(-longest // 20)), range=[-0.4, max(longest - 1, 1) + 0.4]
    )
    figure.update_yaxes(title={"text": "loss (nats per token)"}, showticklabels=longest > 0)
    for step, text in (changes or {}).items():
        figure.add_vline(x=step - 0.5, line={"color": palette.MUTED, "width": 1.5, "dash": "dot"})
        figure.add_annotation(
            x=step - 0.5, y=1, yref="paper", text=html.escape(text), showarrow=False, xanchor="left", yanchor="top",
            xshift=4, font={"size": 12, "color": palette.MUTED},
        )  # fmt: skip
    several = len(curves) > 1
    figure.update_layout(hovermode="x unified" if several else "closest", margin_t=98 if several else 72)
    return figure


def named_curves(runs: Curve | Sequence[HasLosses] | Mapping[str, Curve]) -> dict[str, list[float]]:
    """Every curve under its name; runs of one layout are numbered.

    >>> named_curves([3.0, 2.5])
    {'loss': [3.0, 2.5]}
    """
    if isinstance(runs, Mapping):
        return {str(name): _values(curve) for name, curve in runs.items()}
    if isinstance(runs, Sequence) and all(isinstance(item, int | float) for item in runs):
        return {"loss": [float(item) for item in runs if isinstance(item, int | float)]}
    members = runs if isinstance(runs, Sequence) else [runs]
    curves: dict[str, list[float]] = {}
    for number, run in enumerate(members):
        name = _layout_name(run) or f"run {number}"
        repeats = sum(known == name or known.startswith(f"{name} (") for known in curves)
        curves[f"{name} ({repeats + 1})" if repeats else name] = _values(run)
    return curves


def largest_difference(curves: Sequence[Sequence[float]]) -> float | None:
    """The largest relative difference of any curve from the first, over the steps all have; None without two curves.

    >>> largest_difference([[2.0, 1.0], [2.0, 1.1]])
    0.1
    """
    steps = min((len(curve) for curve in curves), default=0)
    if len(curves) < 2 or steps == 0:
        return None
    first = curves[0]
    return max(
        round(abs(curve[step] - first[step]) / abs(first[step] or 1.0), 12)
        for curve in curves[1:]
        for step in range(steps)
    )


def _values(curve: Any) -> list[float]:
    return [float(value) for value in getattr(curve, "losses", curve)]


def _layout_name(run: Any) -> str:
    layout = getattr(getattr(run, "plan", None), "layout", None)
    return "" if layout is None else str(layout)


def _title(curves: Mapping[str, list[float]]) -> str:
    if len(curves) == 1:
        (name,) = curves
        return "Loss" if name == "loss" else f"Loss · {name}"
    return f"Loss · {len(curves)} runs" if curves else "Loss"


def _notes(curves: Mapping[str, list[float]]) -> list[str]:
    notes = []
    difference = largest_difference(list(curves.values()))
    if difference is not None:
        notes.append("equal to the last bit" if difference == 0 else f"largest relative difference {difference:.1e}")
    elif len(curves) == 1:
        (values,) = curves.values()
        if values:
            notes.append(f"{values[0]:.4f} at step 0, {values[-1]:.4f} at step {len(values) - 1}")
    for name, values in curves.items():
        broken = next((step for step, value in enumerate(values) if not math.isfinite(value)), None)
        if broken is not None:
            notes.append(f"{name} is {values[broken]} from step {broken}")
    return notes
