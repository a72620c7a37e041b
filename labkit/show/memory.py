"""Memory of every rank: how it moves over time, and its peak."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.errors import PlanError
from labkit.predict import Memories, Memory
from labkit.show import palette
from labkit.show.given import HasTrace, trace_of
from labkit.show.held import held
from labkit.show.units import memory_text, memory_unit, time_unit
from labkit.spec import Hardware
from labkit.spec.checks import shown
from labkit.trace import Event, Trace

_MAX_NAMED_RANKS = 16


def memory(
    given: Trace | HasTrace | Sequence[Memory],
    step: int | None = None,
    *,
    measured: Sequence[Memory] | None = None,
    hardware: Hardware | None = None,
) -> go.Figure:
    """Draw memory: the samples of a trace over time, or what ranks hold at their peak by category.

    Args:
        given: a trace whose `memory` events carry bytes in `num_bytes`, or a run, which has one: over time on the left,
            the peak of each rank on the right. Or what `lk.predict.memory` returned: a bar for each rank.
        step: only this training step of a trace; None: the whole trace.
        measured: beside predicted bars, what ranks were found to hold.
        hardware: beside predicted bars, a line at the memory that a device has, and what would fit it.

    Raises:
        PlanError: nothing of the kind, `step` beside predicted bars, or `measured` or `hardware` beside a trace.
    """
    if isinstance(given, Sequence) and (isinstance(given, Memories) or all(isinstance(one, Memory) for one in given)):
        if step is not None:
            raise PlanError(f"step={shown(step)} beside predicted memory: it is that of every step. Leave it out.")
        return held(given, measured, hardware)
    if measured is not None or hardware is not None:
        raise PlanError(
            "measured or hardware beside a trace: they go beside bars of ranks. Give what lk.predict.memory(plan) "
            "returned, or leave them out."
        )
    return _over_time(trace_of(given), step)  # type: ignore[arg-type]  # it refuses what has no trace


def _over_time(trace: Trace, step: int | None) -> go.Figure:
    shown = trace if step is None else trace.of_step(step)
    samples: dict[int, list[Event]] = {}
    for event in shown.events:
        if event.kind == "memory" and event.num_bytes is not None:
            samples.setdefault(event.rank, []).append(event)
    figure = make_subplots(
        cols=2, column_widths=[0.72, 0.28], horizontal_spacing=0.11, subplot_titles=["over time", "peak"]
    )
    peaks = {rank: max(event.num_bytes or 0 for event in events) for rank, events in sorted(samples.items())}
    if peaks:
        _draw(figure, samples, peaks)
    else:
        figure.add_annotation(
            text="this trace has no memory samples", showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper",
            font={"color": palette.MUTED, "size": 14},
        )  # fmt: skip
    palette.dress(figure, title=_title(trace), notes=_notes(peaks), height=_height(len(peaks)))
    # The peaks carry each rank's name and colour, so they are the legend of the lines too.
    figure.update_layout(bargap=0.25, showlegend=False)
    return figure


def _draw(figure: go.Figure, samples: dict[int, list[Event]], peaks: dict[int, int]) -> None:
    unit, size = memory_unit(max(peaks.values()))
    start = min(event.start_s for events in samples.values() for event in events)
    end = max(event.start_s for events in samples.values() for event in events)
    time_name, per_second = time_unit(end - start)
    colors = {rank: palette.rank_color(index, len(peaks)) for index, rank in enumerate(peaks)}
    for rank in peaks:
        events = sorted(samples[rank], key=lambda event: event.start_s)
        figure.add_trace(
            go.Scatter(
                name=f"rank {rank}",
                x=[(event.start_s - start) * per_second for event in events],
                y=[(event.num_bytes or 0) / size for event in events],
                mode="lines",
                line={"color": colors[rank], "width": 2 if len(peaks) <= _MAX_NAMED_RANKS else 1, "shape": "hv"},
                hovertemplate=f"<b>rank {rank}</b><br>%{{y:.2f}} {unit} at %{{x:.1f}} {time_name}<extra></extra>",
            ),
            row=1,
            col=1,
        )
    figure.add_trace(
        go.Bar(
            orientation="h",
            y=[f"rank {rank}" for rank in peaks],
            x=[peak / size for peak in peaks.values()],
            marker={"color": list(colors.values())},
            text=[memory_text(peak) for peak in peaks.values()] if len(peaks) <= _MAX_NAMED_RANKS else None,
            textposition="inside",
            insidetextanchor="end",
            hovertemplate=f"<b>%{{y}}</b><br>peak %{{x:.2f}} {unit}<extra></extra>",
        ),
        row=1,
        col=2,
    )
    figure.update_xaxes(title={"text": f"time ({time_name})"}, row=1, col=1)
    figure.update_yaxes(title={"text": f"memory ({unit})"}, rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title={"text": f"peak ({unit})"}, rangemode="tozero", row=1, col=2)
    every = 1 if len(peaks) <= _MAX_NAMED_RANKS else 4
    names = [f"rank {rank}" for rank in peaks]
    figure.update_yaxes(autorange="reversed", tickvals=names[::every], tickfont={"size": 11}, row=1, col=2)


def _title(trace: Trace) -> str:
    parts = ["Predicted memory" if trace.origin == "predicted" else "Measured memory"]
    if trace.plan is not None:
        parts.append(str(trace.plan.layout))
    return " · ".join(parts)


def _notes(peaks: dict[int, int]) -> list[str]:
    if not peaks:
        return []
    top = max(peaks, key=lambda rank: peaks[rank])
    low = min(peaks, key=lambda rank: peaks[rank])
    notes = [f"highest peak {memory_text(peaks[top])} on rank {top}"]
    if len(peaks) > 1:
        notes.append(f"lowest {memory_text(peaks[low])} on rank {low}")
    return notes


def _height(num_ranks: int) -> int:
    return max(360, 180 + 7 * num_ranks)
