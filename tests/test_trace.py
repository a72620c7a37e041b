import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import plan as planning
from labkit import predict
from labkit.errors import LabError
from labkit.spec import Layout, Model, Pace
from labkit.trace import KINDS, Event, Trace

WHOLE = st.none() | st.integers(0, 2**40)
EVENTS = st.builds(
    Event,
    rank=st.integers(0, 9),
    kind=st.sampled_from(KINDS) | st.text(min_size=1, max_size=5),
    start_s=st.floats(-1e9, 1e9),
    duration_s=st.floats(0, 1e6),
    step=WHOLE,
    stage=WHOLE,
    microbatch=WHOLE,
    group=st.none() | st.text(max_size=5),
    seq=WHOLE,
    num_bytes=WHOLE,
    peer=WHOLE,
)
PLANS = st.sampled_from(
    [
        None,
        *(planning.build(Model.preset("tiny"), Layout.parse(text)) for text in ("dp1", "dp2 pp2", "tp2 bf16 gpipe m3")),
    ]
)
SECONDS = st.floats(1e-6, 10)
DECLARED = SECONDS | st.lists(SECONDS, min_size=1, max_size=4)
PACES = st.none() | st.builds(Pace, forward_s=DECLARED, backward_s=DECLARED)
TRACES = st.builds(
    Trace, st.lists(EVENTS, max_size=8), st.sampled_from(["measured", "predicted"]), PLANS, PACES, st.booleans()
)


def F(rank, start_s, duration_s, step=0, kind="F"):
    return Event(rank, kind, start_s, duration_s, step=step)


@given(TRACES)
def test_from_jsonl_undoes_to_jsonl(trace):
    again = Trace.from_jsonl(trace.to_jsonl())
    assert again == trace
    assert again.to_jsonl() == trace.to_jsonl()


@given(EVENTS)
def test_from_row_undoes_to_row(event):
    assert Event.from_row(event.rank, json.loads(json.dumps(event.to_row()))) == event


@given(TRACES)
def test_totals_of_any_trace_are_numbers(trace):
    assert 0 <= trace.bubble_fraction <= 1
    assert math.isfinite(trace.step_time_s)
    assert trace.peak_bytes >= 0
    assert trace.num_steps == len(trace.steps)
    assert sum(trace.of_rank(rank).num_events for rank in trace.ranks) == trace.num_events
    assert pickle.loads(pickle.dumps(trace)) == trace
    json.loads(trace.to_chrome())


def test_files(tmp_path):
    trace = Trace([F(0, 0.0, 1.0)], "predicted")
    path = tmp_path / "trace.jsonl"
    assert trace.to_jsonl(path) == path.read_text(encoding="utf-8")
    assert Trace.from_jsonl(path) == trace
    assert trace.to_chrome(tmp_path / "chrome.json") == (tmp_path / "chrome.json").read_text(encoding="utf-8")


def test_step_time_is_the_median_over_steps_of_the_slowest_rank():
    steps = [Event(rank, "step", 10.0 * step, 1.0 + rank + step, step=step) for rank in (0, 1) for step in (0, 1, 4)]
    assert Trace(steps).step_time_s == 3.0
    assert Trace([F(0, 1.0, 1.0), F(1, 4.0, 2.0)]).step_time_s == 5.0
    assert Trace([]).step_time_s == 0.0


def test_bubble_is_idle_over_total_of_compute():
    trace = Trace([F(0, 0.0, 1.0), F(1, 1.0, 1.0), F(1, 2.0, 1.0, kind="B"), F(0, 3.0, 1.0, kind="B")])
    assert trace.bubble_fraction == 0.5
    with_optimizer = trace.with_events([*trace.events, F(0, 4.0, 9.0, kind="optimizer"), F(1, 3.0, 5.0, kind="wait")])
    assert with_optimizer.bubble_fraction == 0.5


def test_overlapping_compute_of_a_rank_counts_once():
    assert Trace([F(0, 0.0, 2.0), F(0, 1.0, 2.0), F(0, 1.5, 0.5), F(1, 0.0, 3.0)]).bubble_fraction == 0.0


def test_memory_peaks():
    events = [
        Event(rank, "memory", 0.1 * at, 0.0, num_bytes=size) for rank, at, size in [(0, 0, 5), (1, 1, 9), (0, 2, 7)]
    ]
    assert Trace(events).peak_bytes == 9
    assert Trace(events).peak_bytes_by_rank == {0: 7, 1: 9}
    assert Trace([F(0, 0.0, 1.0)]).peak_bytes == 0


def test_a_step_alone():
    trace = Trace([F(0, 0.0, 1.0), F(0, 1.0, 3.0, step=1)], "predicted", pace=Pace(forward_s=1, backward_s=2))
    assert trace.of_step(1).step_time_s == 3.0
    assert trace.of_step(1).pace == trace.pace
    for step in (2, None, "1"):
        with pytest.raises(LabError, match=r"has no event in this trace: it has steps 0 to 1\."):
            trace.of_step(step)
    with pytest.raises(LabError, match="it has none"):
        Trace([]).of_step(0)


def test_events_are_kept_in_order_of_start():
    trace = Trace([F(1, 5.0, 1.0), F(0, 4.0, 1.0), F(0, 5.0, 1.0)])
    assert [(event.rank, event.start_s) for event in trace.events] == [(0, 4.0), (0, 5.0), (1, 5.0)]
    assert trace.shifted().events[0].start_s == 0.0


def test_chrome_has_a_process_per_rank_in_microseconds():
    events = [
        Event(2, "F", 7.5, 0.25, step=1, stage=1, microbatch=3),
        Event(0, "all_reduce", 7.0, 0.5, step=1, group="dp", seq=4, num_bytes=1024),
        Event(0, "memory", 7.25, 0.0, num_bytes=4096),
    ]
    records = json.loads(Trace(events).to_chrome())["traceEvents"]
    names = {record["pid"]: record["args"]["name"] for record in records if record["name"] == "process_name"}
    assert names == {0: "rank 0", 2: "rank 2"}
    complete = {record["name"]: record for record in records if record["ph"] == "X"}
    assert (complete["1F3"]["ts"], complete["1F3"]["dur"], complete["1F3"]["pid"]) == (500_000.0, 250_000.0, 2)
    assert complete["all_reduce"]["args"] == {"step": 1, "group": "dp", "seq": 4, "num_bytes": 1024}
    assert next(record for record in records if record["ph"] == "C")["args"] == {"bytes": 4096}


@pytest.mark.parametrize(
    "fields",
    [
        *[(rank, "F", 0, 1) for rank in (-1, None, True, 0.0, "0")],
        *[(0, kind, 0, 1) for kind in ("", None, 3)],
        *[(0, "F", start_s, 1) for start_s in (math.nan, "0", None, 10**400)],
        *[(0, "F", 0, duration_s) for duration_s in (-1e-9, math.inf, math.nan, None)],
    ],
)
def test_an_impossible_event(fields):
    with pytest.raises(LabError, match="event rank="):
        Event(*fields)


@pytest.mark.parametrize(
    "row",
    [
        None,
        "F00",
        ["F", 0],
        ["F", 0, 1, *[None] * 8],
        ["F", 0, 1, 0.5],
        ["F", 0, 1, True],
        ["F", 0, 1, None, "1"],
        ["F", 0, 1, 0, 0, 0, 3],
    ],
)
def test_an_impossible_row(row):
    with pytest.raises(LabError, match="rank 1"):
        Event.from_row(1, row)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is missing"),
        ("{}", "line 1 is no header"),
        ("[1]", "line 1 is no header"),
        ("hello", "line 1 is no JSON"),
        ("[" * 100_000, "line 1 is no JSON"),
        (Trace([]).to_jsonl() + "\n[0, \"F\", 0]", "line 3: event row"),
        (Trace([]).to_jsonl() + "{}", "line 2 is no event"),
        (Trace([]).to_jsonl() + "[0, \"F\", NaN, 1]", "line 2: event rank=0"),
        (Trace([]).to_jsonl().replace("measured", "guessed"), "origin='guessed' is unknown"),
        (Trace([]).to_jsonl().replace('"pace": null', '"pace": {"x": 1}'), "line 1, the header"),
        (Trace([]).to_jsonl().replace('"model": null', '"model": {"x": 1}'), "line 1, the header"),
        (None, "is no text"),
    ],
    ids=range(12),
)  # fmt: skip
def test_broken_json_lines(text, message):
    with pytest.raises(LabError, match=message):
        Trace.from_jsonl(text)


def test_a_trace_of_something_else():
    for wrong in ([(0, "F", 0.0, 1.0)], [None]):
        with pytest.raises(LabError, match="is no event"):
            Trace(wrong)
    with pytest.raises(LabError, match="origin='real' is unknown"):
        Trace([], "real")
    with pytest.raises(LabError, match="is no Plan"):
        Trace([], plan="dp2")
    with pytest.raises(LabError, match="is no Pace"):
        Trace([], pace=0.1)


def test_a_schedule_of_one_s_own_travels_with_the_trace():
    own = "0F0 1F0 1B0 0B0\n2F0 3F0 3B0 2B0"
    built = planning.build(Model.preset("tiny"), Layout.parse("pp2 v2 m1"), schedule=own)
    trace = predict.timeline(built)
    again = Trace.from_jsonl(trace.to_jsonl())
    assert again.plan == built
    assert again.events == trace.events
