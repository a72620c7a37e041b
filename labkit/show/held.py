"""What ranks hold at their peak, a bar for each: predicted, measured beside it, and what a device has."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from labkit.errors import PlanError
from labkit.predict import CATEGORIES, Memories, Memory, fitting
from labkit.show import palette
from labkit.show.units import memory_text, memory_unit
from labkit.spec import Hardware
from labkit.spec.checks import shown

__all__ = ["held"]

COLORS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#56B4E9",
    "buffers": "#CC79A7",
    "temporary": "#F2CC6B",
}
REMAINDER = "not accounted for"
_MOST_RANKS = 64
_ROW_HEIGHT, _FRAME_HEIGHT = 34, 200


def held(
    predicted: Sequence[Memory], measured: Sequence[Memory] | None = None, hardware: Hardware | None = None
) -> go.Figure:
    """Draw the peak of every rank by category; ranks that hold the same share a bar.

    Args:
        predicted: what `lk.predict.memory` returned.
        measured: of the same ranks; what its peak has beyond its categories is a part of its own.
        hardware: draws a line at its memory, and says what fits.

    Raises:
        PlanError: no rank to draw, a predicted rank that was not measured, or no hardware.
    """
    if not len(predicted):
        raise PlanError("no rank to draw: give what lk.predict.memory(plan) returned.")
    _check(measured, hardware)
    places = _places(predicted)
    bars = {_name(ranks): one for ranks, one in places}
    measured_bars = _measured(places, measured) if measured is not None else {}
    names = [name for own in bars for name in ([own, f"{own}, measured"] if measured_bars else [own])]
    unit, size = memory_unit(max(one.peak for one in (*bars.values(), *measured_bars.values())))
    figure = go.Figure()
    parts = {**bars, **measured_bars}
    for category in (*CATEGORIES, REMAINDER):
        amounts = [_amount(parts[name], category) for name in names]
        if any(amounts):
            figure.add_trace(_bar(category, names, amounts, unit, size))
    _write_sums(figure, names, [parts[name].peak for name in names], size)
    palette.dress(
        figure,
        title=_title(predicted),
        notes=_notes(predicted, hardware),
        height=_FRAME_HEIGHT + _ROW_HEIGHT * len(names),
    )
    top = max(one.peak for one in parts.values()) / size
    figure.update_layout(barmode="stack", bargap=0.3, legend={"traceorder": "normal"})
    figure.update_yaxes(autorange="reversed", tickfont={"size": 11})
    if hardware is not None:
        _mark(figure, hardware, size)
        top = max(top, min(hardware.memory_bytes / size, 4 * top))
    figure.update_xaxes(title={"text": f"memory at the peak ({unit})"}, range=[0, 1.12 * top])
    return figure


def _mark(figure: go.Figure, hardware: Hardware, size: float) -> None:
    """A line at a device's memory."""
    figure.add_vline(
        x=hardware.memory_bytes / size,
        line={"dash": "dash", "color": palette.MUTED},
        annotation={"text": hardware.name, "font": {"color": palette.MUTED}},
        annotation_position="bottom right",
    )


def _check(measured: object, hardware: object) -> None:
    is_list = isinstance(measured, Sequence) and (
        isinstance(measured, Memories) or all(isinstance(one, Memory) for one in measured)
    )
    if measured is not None and not is_list:
        raise PlanError(
            f"measured={shown(measured)} is no list of Memory: give a Memory for each rank, as lk.predict.memory does."
        )
    if hardware is not None and not isinstance(hardware, Hardware):
        raise PlanError(f"hardware={shown(hardware)} is no Hardware: use lk.spec.Hardware.preset('h100').")


def _places(predicted: Sequence[Memory]) -> list[tuple[Sequence[int], Memory]]:
    """Ranks that hold the same, together; of many ranks the first of each pipeline place stands for all."""
    if isinstance(predicted, Memories) and len(predicted) > _MOST_RANKS:
        each = len(predicted) // len(predicted.distinct())
        return [(range(one.rank, one.rank + each), one) for one in predicted.distinct()]
    found: dict[tuple[int, ...], tuple[list[int], Memory]] = {}
    for one in predicted:
        found.setdefault(tuple(one.at_peak.values()), ([], one))[0].append(one.rank)
    return [(ranks, one) for ranks, one in found.values()]


def _name(ranks: Sequence[int]) -> str:
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    return f"ranks {first}-{last}" if len(ranks) == last - first + 1 and last > first + 1 else _listed(ranks)


def _listed(ranks: Sequence[int]) -> str:
    return "ranks " + ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")


def _measured(places: list[tuple[Sequence[int], Memory]], measured: Sequence[Memory]) -> dict[str, Memory]:
    """The measured rank with the highest peak of every bar's."""
    found = {}
    for ranks, _ in places:
        of_bar = [one for one in measured if one.rank in ranks]
        if not of_bar:
            raise PlanError(f"rank {ranks[0]} was predicted and not measured: give both of the same plan.")
        found[f"{_name(ranks)}, measured"] = max(of_bar, key=lambda one: one.peak)
    return found


def _amount(one: Memory, category: str) -> int:
    if category == REMAINDER:
        return max(0, one.peak - sum(one.at_peak.values()))
    return one.at_peak.get(category, 0)


def _bar(category: str, names: list[str], amounts: list[int], unit: str, size: int) -> go.Bar:
    return go.Bar(
        name=category,
        orientation="h",
        y=names,
        x=[amount / size for amount in amounts],
        marker={"color": COLORS.get(category, palette.IDLE_HATCH), "line": {"width": 0}},
        hovertemplate=f"<b>%{{y}}</b><br>{category}: %{{x:.3g}} {unit}<extra></extra>",
    )


def _write_sums(figure: go.Figure, names: list[str], peaks: list[int], size: int) -> None:
    figure.add_trace(
        go.Scatter(
            y=names,
            x=[peak / size for peak in peaks],
            mode="text",
            text=[f" {memory_text(peak)}" for peak in peaks],
            textposition="middle right",
            showlegend=False,
            hoverinfo="skip",
        )
    )


def _title(predicted: Sequence[Memory]) -> str:
    of = f" · {predicted.plan.layout}" if isinstance(predicted, Memories) else ""
    return f"Memory at the peak{of}"


def _notes(predicted: Sequence[Memory], hardware: Hardware | None) -> list[str]:
    most = predicted.largest if isinstance(predicted, Memories) else max(predicted, key=lambda one: one.peak)
    kinds: Mapping[str, int] = most.activations_by_kind
    largest = max(kinds, key=lambda kind: kinds[kind]) if kinds else ""
    notes = [] if hardware is None else [_fit(predicted, most, hardware)]
    notes.append(f"highest on rank {most.rank}, at {most.peak_at}")
    if largest and hardware is None:
        notes.append(f"most of its activations: {largest}, {memory_text(kinds[largest])}")
    if most.host:
        notes.append(f"{memory_text(most.host)} of it in host memory")
    return notes


def _fit(predicted: Sequence[Memory], most: Memory, hardware: Hardware) -> str:
    needed, has = most.peak - most.host, hardware.memory_bytes
    if needed <= has:
        return f"fits {hardware.name} with {memory_text(has - needed)} to spare"
    short = f"{hardware.name} is {memory_text(needed - has)} too small"
    if not isinstance(predicted, Memories):
        return short
    try:
        other = fitting(predicted.plan, has, optimizer=predicted.optimizer)
    except PlanError as error:
        return f"{short}: {error}"
    return f"{short}; '{other.layout}' would fit"
