"""What a run records and how fast it was; clocks of several ranks on one axis."""

import doctest
import math
from types import SimpleNamespace

import pytest

import labkit as lk
from labkit.launch import efficiency as efficiency_module
from labkit.launch import progress as progress_module
from labkit.launch.efficiency import efficiency, tokens_per_second
from labkit.launch.record import Record
from labkit.measure import Alignment, Offsets, events, sample_offsets, trace
from labkit.measure import alignment as alignment_module


def small_plan(text="dp2"):
    model = lk.spec.Model(num_layers=2, d_model=16, num_heads=2, vocab_size=256, seq_len=8)
    return lk.plan.build(model, lk.spec.Layout.parse(text))


def test_mfu_against_a_known_gpu():
    plan = small_plan()
    peak = lk.spec.Hardware.preset("h100").peak_flops("fp32")
    speed = 2 * peak / plan.model.flops_per_token / 4
    found = efficiency(plan, speed, ["NVIDIA H100 80GB HBM3"] * 2)
    assert found.mfu == pytest.approx(0.25)
    assert "2 x" in found.reason
    assert efficiency(plan, speed, ["NVIDIA H100 80GB HBM3", "cpu"]).mfu is None
    assert efficiency(plan, None, ["NVIDIA H100 80GB HBM3"] * 2).mfu is None


def test_tokens_per_second_leaves_out_the_warm_up():
    assert tokens_per_second(10, []) is None
    assert tokens_per_second(10, [2.0]) == 5.0
    assert tokens_per_second(10, [2.0, 1.0, math.nan]) == 10.0


def test_memory_is_bounded_and_what_was_dropped_is_counted():
    record = Record([0, 1], max_events=10)
    for step in range(20):
        record.on_events(step % 2, {"events": [["F", 0.0, 1.0, step]] * 3})
    rows, following = record.rows()
    assert len(rows) == 9
    assert record.num_dropped == 51
    assert following == 20
    assert {row[3] for _, row in rows} == {17, 18, 19}
    assert record.rows(since=19)[0] == [(1, ["F", 0.0, 1.0, 19])] * 3


def test_a_missing_step_report_is_a_gap_and_not_a_shift():
    record = Record([0])
    record.on_step(0, {"step": 1, "loss": 2.0, "grad_norm": None, "step_s": 0.1})
    assert math.isnan(record.losses()[0])
    assert record.losses()[1] == 2.0
    assert math.isnan(record.grad_norms()[1])


def test_a_run_that_goes_on_counts_its_own_steps():
    record = Record([0, 1], first_step=None)
    record.on_events(1, {"events": [["F", 0.0, 1.0, 7], ["memory", 0.0, 0.0]]})
    for step in (7, 8):
        record.on_step(0, {"step": step, "loss": float(step), "grad_norm": 1.0, "step_s": 0.1})
    record.on_events(0, {"events": [["F", 0.0, 1.0, 8]]})
    assert record.losses() == [7.0, 8.0]
    assert [list(row)[3:] for _, row in record.rows()[0]] == [[0], [], [1]]


def test_clocks_are_read_along_a_line():
    start = Offsets(at_s=100.0, offset_s={0: 0.0, 1: 90.0})
    end = Offsets(at_s=200.0, offset_s={0: 0.0, 1: 91.0})
    both = Alignment(start=start, end=end)
    assert both.local_s(1, 10.0) == pytest.approx(100.0)
    assert both.local_s(1, 109.0) == pytest.approx(200.0)
    assert both.local_s(1, 59.5) == pytest.approx(150.0)
    assert both.local_s(0, 7.0) == 7.0
    assert Alignment(start=start, end=None).local_s(1, 109.0) == pytest.approx(199.0)
    assert both.covers(frozenset({0, 1}))
    assert not both.covers(frozenset({2}))
    assert Alignment(start=None, end=None).local_s(1, 3.0) == 3.0


def test_events_of_ranks_with_different_clocks_meet_on_one():
    alignment = Alignment(start=Offsets(at_s=100.0, offset_s={0: 0.0, 1: 90.0}), end=None)
    rows = [(1, ["RECV_F", 10.5, 0.1, 0, 1, 0]), (0, ["SEND_F", 100.25, 0.1, 0, 0, 0])]
    assert [event.start_s for event in events(rows, alignment)] == [100.5, 100.25]
    measured = trace(small_plan(), rows, alignment)
    assert [(event.rank, event.start_s) for event in measured.events] == [(0, 0.0), (1, 0.25)]
    assert measured.aligned
    assert measured.origin == "measured"


def test_offsets_that_cannot_be_had():
    assert sample_offsets(SimpleNamespace(clock_offsets=dict)) is None
    assert sample_offsets(SimpleNamespace(clock_offsets=lambda: {0: 1.5, 1: -2e-4})).offset_s == {0: 1.5, 1: 0.0}


@pytest.mark.parametrize("module", [alignment_module, efficiency_module, progress_module])
def test_examples_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
