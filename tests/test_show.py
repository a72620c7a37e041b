"""Pictures say what the values say: bars, bubbles, titles, units."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import plan, predict, show
from labkit.errors import PlanError
from labkit.show.bars import Window, bars_by_kind, gaps, idle_bars, window_of
from labkit.show.losses import largest_difference, named_curves
from labkit.show.palette import STYLES, rank_color
from labkit.show.units import duration_text, memory_text, traffic_text
from labkit.spec import Layout, Model, Pace
from labkit.trace import KINDS, Event, Trace

TINY = Model.preset("tiny")
PACE = Pace(forward_s=0.02, backward_s=0.04)


def predicted(text: str, *, send_s: float = 0.0, model: Model = TINY) -> Trace:
    built = plan.build(model, Layout.parse(text))
    trace = predict.timeline(built, forward_s=PACE.forward_s, backward_s=PACE.backward_s, send_s=send_s)
    return replace(trace, pace=PACE)


def bars(figure: go.Figure, name: str) -> go.Bar:
    return next(trace for trace in figure.data if trace.name == name)


def test_every_compute_event_is_one_bar_in_its_rank_with_its_time() -> None:
    trace = predicted("pp4 m8")
    figure = show.timeline(trace)
    for kind in ("F", "B"):
        events = [event for event in trace.events if event.kind == kind]
        drawn = bars(figure, STYLES[kind].label)
        assert list(drawn.y) == [event.rank for event in events]
        np.testing.assert_allclose(np.asarray(drawn.base, dtype=float), [event.start_s * 1e3 for event in events])
        np.testing.assert_allclose(drawn.x, [event.duration_s * 1e3 for event in events])
        assert list(drawn.text) == [str(event.microbatch) for event in events]


def test_the_number_of_traces_does_not_depend_on_the_number_of_events() -> None:
    assert len(show.timeline(predicted("pp4 m4")).data) == len(show.timeline(predicted("pp4 m64")).data)
    assert len(show.timeline(Trace([])).data) == len(show.timeline(predicted("pp4 m4", send_s=0.001)).data)


def test_a_rank_of_several_stages_has_one_row_and_bars_that_name_the_stage() -> None:
    trace = predicted("pp2 zbv v2 m2")
    figure = show.timeline(trace)
    for kind in ("F", "I", "W"):
        drawn = bars(figure, STYLES[kind].label)
        events = [event for event in trace.events if event.kind == kind]
        assert list(drawn.text) == [event.label for event in events]
        assert set(drawn.y) == {0, 1}
        assert all(f"stage {event.stage}" in text for event, text in zip(events, drawn.hovertext, strict=True))


@pytest.mark.parametrize("text", ["pp4 m8", "pp4 gpipe m8", "dp2 pp2 m4", "pp2 m2", "dp4", "pp2 dualpipe_v v2 m4"])
def test_the_hatched_part_is_the_bubble_fraction(text: str) -> None:
    trace = predicted(text, send_s=0.003)
    window = window_of(trace.events)
    idle = sum(idle_bars(trace.events, window).durations_s)
    compute = [event for event in trace.events if event.kind in ("F", "B", "I", "W")]
    total = window_of(compute).span_s * len(trace.ranks)
    assert idle / total == pytest.approx(trace.bubble_fraction, abs=1e-9)


def test_hover_names_rank_stage_microbatch_and_milliseconds() -> None:
    event = Event(2, "F", 1.0, 0.0205, step=3, stage=2, microbatch=5)
    figure = show.timeline(Trace([event]))
    (text,) = bars(figure, "forward").hovertext
    for part in ("rank 2", "stage 2", "micro-batch 5", "20.50 ms", "step 3"):
        assert part in text


def test_hover_of_communication_names_bytes_peer_and_group() -> None:
    window = Window(start_s=0.0, end_s=1.0)
    sent = Event(0, "SEND_F", 0.0, 0.001, num_bytes=1_200_000, peer=1)
    got = Event(1, "RECV_F", 0.0, 0.001, peer=0)
    reduced = Event(0, "all_reduce", 0.0, 0.001, group="dp", seq=7)
    texts = {each.kind: each.hovers for each in bars_by_kind([sent, got, reduced], window)}
    assert "1.2 MB" in texts["SEND_F"][0]
    assert "to rank 1" in texts["SEND_F"][0]
    assert "from rank 0" in texts["RECV_F"][0]
    assert "over dp, number 7" in texts["all_reduce"][0]


def test_titles_say_what_kind_of_picture_it_is() -> None:
    trace = predicted("dp2 pp2 m4")
    text = show.timeline(trace).layout.title.text
    assert "Predicted" in text
    assert "dp2 pp2 1f1b m4" in text
    assert "paced: durations as declared" in text
    assert "20 ms" in text
    assert "40 ms" in text
    measured = Trace(trace.events, "measured", trace.plan, None, aligned=False)
    text = show.timeline(measured).layout.title.text
    assert "Measured" in text
    assert "clocks are not aligned" in text
    assert "paced" not in text


def test_the_default_step_is_the_last_that_every_rank_finished() -> None:
    events = [Event(rank, "F", float(step), 0.5, step=step) for step in (0, 1) for rank in (0, 1)]
    events.append(Event(0, "F", 2.0, 0.5, step=2))
    trace = Trace(events)
    assert "step 1" in show.timeline(trace).layout.title.text
    assert len(bars(show.timeline(trace), "forward").y) == 2
    assert len(bars(show.timeline(trace, step=0), "forward").y) == 2
    assert len(bars(show.timeline(trace, step="all"), "forward").y) == 5
    with pytest.raises(PlanError, match=r"step=9 is not in the trace, its steps are 0 to 2"):
        show.timeline(trace, step=9)


def test_steps_are_marked_when_all_are_drawn() -> None:
    events = [Event(0, "F", float(step), 0.5, step=step) for step in range(3)]
    figure = show.timeline(Trace(events), step="all")
    assert [shape.x0 for shape in figure.layout.shapes] == [0.0, 1000.0, 2000.0]
    assert [note.text for note in figure.layout.annotations] == ["step 0", "step 1", "step 2"]


def test_sixty_four_ranks_fit_a_screen_and_have_no_numbers() -> None:
    trace = predicted("dp4 tp2 pp8 m16", model=Model.preset("llama3-8b"))
    figure = show.timeline(trace)
    assert figure.layout.height <= 1100
    assert bars(figure, "forward").text is None
    assert len(figure.layout.yaxis.ticktext) == 16
    assert "rank 8" in figure.layout.yaxis.ticktext[2]


def test_a_trace_without_events_says_so() -> None:
    built = plan.build(TINY, Layout.parse("pp4 m4"))
    figure = show.timeline(Trace([], "measured", built))
    assert figure.layout.annotations[0].text == "no events yet"
    assert len(figure.layout.yaxis.ticktext) == 4


def test_figures_serialise() -> None:
    trace = predicted("pp4 m8", send_s=0.001)
    for figure in (show.timeline(trace), show.losses({"a": [1.0]}), show.memory(trace)):
        assert json.loads(figure.to_json())["data"] is not None


def test_every_known_kind_has_a_style_and_forward_differs_from_backward() -> None:
    assert set(STYLES) | {"memory", "step"} >= set(KINDS)
    assert len({style.color for style in STYLES.values()}) == len(STYLES)
    assert len({style.label for style in STYLES.values()}) == len(STYLES)


def test_an_unknown_kind_is_drawn_under_its_name() -> None:
    figure = show.timeline(Trace([Event(0, "checkpoint", 0.0, 1.0, step=0)]))
    assert list(bars(figure, "checkpoint").x) == [1000.0]


def test_rank_colors_stay_apart_up_to_eight_and_exist_beyond() -> None:
    assert len({rank_color(rank, 8) for rank in range(8)}) == 8
    assert len({rank_color(rank, 64) for rank in range(64)}) == 64


def run_of(text: str, losses: list[float]) -> SimpleNamespace:
    return SimpleNamespace(plan=plan.build(TINY, Layout.parse(text)), losses=losses)


def test_losses_are_named_by_layout() -> None:
    figure = show.losses([run_of("dp4", [3.0, 2.0]), run_of("tp4", [3.0, 2.0])])
    assert [trace.name for trace in figure.data] == ["dp4", "tp4"]
    assert "equal to the last bit" in figure.layout.title.text
    assert list(figure.data[0].y) == [3.0, 2.0]


def test_two_runs_of_one_layout_are_numbered() -> None:
    runs = [run_of("dp4", [1.0]), run_of("dp4", [2.0]), run_of("dp4", [3.0])]
    assert list(named_curves(runs)) == ["dp4", "dp4 (2)", "dp4 (3)"]


def test_one_run_a_mapping_and_a_list_of_numbers_are_drawn_alike() -> None:
    values = [3.0, 2.5]
    for given_runs in (run_of("dp4", values), {"mine": values}, values, {"mine": run_of("dp4", values)}):
        (curve,) = show.losses(given_runs).data
        assert list(curve.y) == values


def test_a_coinciding_curve_is_thinner_than_the_one_below() -> None:
    first, second = show.losses({"a": [1.0], "b": [1.0]}).data
    assert first.line.width > second.line.width


def test_a_change_during_training_is_marked() -> None:
    figure = show.losses([3.0, 2.5, 2.0], changes={2: "tp2 <pp2>"})
    (line,) = figure.layout.shapes
    assert line.x0 == line.x1 == 1.5
    assert figure.layout.annotations[0].text == "tp2 &lt;pp2&gt;"
    assert not show.losses([3.0]).layout.shapes


def test_broken_losses_are_named() -> None:
    text = show.losses({"mine": [3.0, math.nan, math.nan]}).layout.title.text
    assert "mine is nan from step 1" in text


def test_largest_difference_is_relative_to_the_first() -> None:
    assert largest_difference([[2.0, 1.0], [2.0, 1.5], [2.0]]) == 0.0
    assert largest_difference([[2.0, 1.0], [2.0, 1.5]]) == pytest.approx(0.5)
    assert largest_difference([[2.0]]) is None


def memory_trace() -> Trace:
    return Trace(
        [
            Event(rank, "memory", float(i), 0.0, step=i, num_bytes=(rank + 1 + i) * 2**30)
            for rank in (0, 1)
            for i in (0, 1)
        ]
    )


def test_memory_is_drawn_over_time_and_as_peaks() -> None:
    figure = show.memory(memory_trace())
    rank0, rank1, peaks = figure.data
    assert list(rank0.y) == [1.0, 2.0]
    assert list(rank1.y) == [2.0, 3.0]
    assert list(peaks.x) == [2.0, 3.0]
    assert "GiB" in figure.layout.yaxis.title.text
    assert "highest peak 3 GiB on rank 1" in figure.layout.title.text
    assert list(show.memory(memory_trace(), step=0).data[-1].x) == [1.0, 2.0]


def test_memory_without_samples_says_so() -> None:
    assert "no memory samples" in show.memory(predicted("dp4")).layout.annotations[-1].text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration_text(0.0204), "20.4 ms"),
        (duration_text(2.0), "2 s"),
        (memory_text(2**20), "1 MiB"),
        (memory_text(0), "0 B"),
        (traffic_text(2e9), "2 GB"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected


spans = st.lists(
    st.tuples(st.floats(0, 10), st.floats(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8
)


@given(spans)
def test_gaps_and_spans_tile_the_window(busy: list[tuple[float, float]]) -> None:
    window = Window(start_s=0.0, end_s=20.0)
    idle = gaps(busy, window)
    assert idle == sorted(idle)
    for start, end in idle:
        middle = (start + end) / 2
        assert start < end
        assert not any(first < middle < last for first, last in busy)
    points = sorted({0.0, 20.0, *(edge for span in busy for edge in span)})
    covered = sum(
        end - start
        for start, end in itertools.pairwise(points)
        if any(first <= start and end <= last for first, last in busy)
    )
    assert covered + sum(end - start for start, end in idle) == pytest.approx(20.0)


def test_a_run_is_drawn_by_its_trace() -> None:
    trace = predicted("pp2 m4")
    run = SimpleNamespace(trace=trace)
    assert show.timeline(run) == show.timeline(trace)
    assert show.memory(run) == show.memory(trace)


@pytest.mark.parametrize("draw", [show.timeline, show.memory])
def test_what_has_no_trace_is_refused(draw: Callable[[Any], go.Figure]) -> None:
    with pytest.raises(PlanError, match=r"a str is no trace.*Give a run, run\.trace"):
        draw("run")
