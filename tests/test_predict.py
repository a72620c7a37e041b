import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import plan as planning
from labkit import predict
from labkit.errors import PlanError
from labkit.schedule import parse_actions
from labkit.spec import Layout, Model

MODEL = Model(num_layers=16, d_model=64, num_heads=4, vocab_size=256, seq_len=32)


def built(text):
    return planning.build(MODEL, Layout.parse(text))


PLANS = st.builds(
    lambda **fields: planning.build(MODEL, Layout(**fields)),
    dp=st.integers(1, 2),
    tp=st.sampled_from([1, 2]),
    pp=st.integers(1, 8),
    num_microbatches=st.integers(1, 12),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)


@given(PLANS, st.integers(1, 5), st.integers(1, 5))
def test_the_bubble_of_gpipe_and_1f1b_is_the_theory_s(plan, forward_s, backward_s):
    pp, m = plan.layout.pp, plan.layout.num_microbatches
    trace = predict.timeline(plan, forward_s, backward_s)
    assert trace.bubble_fraction == pytest.approx((pp - 1) / (m + pp - 1))
    assert trace.bubble_fraction == pytest.approx(predict.bubble_fraction(pp, m))
    assert trace.step_time_s == (m + pp - 1) * (forward_s + backward_s)
    assert trace.origin == "predicted"
    assert trace.plan == plan


@given(PLANS, st.sampled_from([0.0, 0.5, 3.0]))
def test_no_rank_does_two_things_at_once_and_inputs_come_first(plan, send_s):
    trace = predict.timeline(plan, 1.0, 2.0, send_s)
    last = plan.num_stages - 1
    for rank in range(plan.world_size):
        compute = [event for event in trace.of_rank(rank).events if event.kind in "FB"]
        assert len(compute) == 2 * plan.layout.num_microbatches
        assert [event.label for event in compute] == [str(each) for each in plan.actions[plan.placement(rank).pp_rank]]
        assert all(one.end_s <= two.start_s for one, two in itertools.pairwise(compute))
    done = {(event.kind, event.stage, event.microbatch): event for event in trace.events if event.kind in "FB"}
    for (kind, stage, microbatch), event in done.items():
        before = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
        if 0 <= before[1] <= last:
            assert done[(*before, microbatch)].end_s + send_s <= event.start_s
        if kind == "B":
            assert done["F", stage, microbatch].end_s <= event.start_s


def test_sends_cost_time_and_are_drawn():
    trace = predict.timeline(built("dp2 pp2 m1"), 1.0, 2.0, send_s=0.5)
    assert trace.step_time_s == 7.0
    sends = {(event.rank, event.kind, event.peer) for event in trace.events if "_" in event.kind}
    assert {event for event in sends if event[0] in (0, 2)} == {
        (0, "SEND_F", 2), (2, "RECV_F", 0), (2, "SEND_B", 0), (0, "RECV_B", 2)
    }  # fmt: skip
    assert all("_" not in event.kind for event in predict.timeline(built("pp2")).events)


def test_a_slow_stage_sets_the_pace():
    even = predict.timeline(built("pp4 m8"), 1.0, 1.0)
    uneven = predict.timeline(built("pp4 m8"), [1.0, 1.0, 2.0, 1.0], 1.0)
    assert uneven.step_time_s > even.step_time_s
    assert uneven.bubble_fraction > even.bubble_fraction


def test_each_rank_has_a_step():
    trace = predict.timeline(built("dp2 tp2 pp2"))
    assert sorted(event.rank for event in trace.events if event.kind == "step") == list(range(8))
    assert trace.num_steps == 1


@pytest.mark.parametrize("value", [None, -1.0, math.nan, math.inf, "1", True, [1.0], [1.0, None], [[1], 2]])
@pytest.mark.parametrize("name", ["forward_s", "backward_s"])
def test_impossible_durations(name, value):
    with pytest.raises(PlanError, match=name):
        predict.timeline(built("pp2"), **{name: value})


def test_impossible_requests():
    with pytest.raises(PlanError, match="send_s"):
        predict.timeline(built("pp2"), send_s=-1)
    with pytest.raises(PlanError, match="is no Plan"):
        predict.timeline("pp2")
    with pytest.raises(PlanError, match=r"has up to 134\d+ events and a timeline holds 2000000"):
        predict.timeline(built("dp1024 m65536"))
    for sizes in ((0, 1), (1, 0), (None, 1), (1, 2.5)):
        with pytest.raises(PlanError, match=r"num_(stages|microbatches)="):
            predict.bubble_fraction(*sizes)


def test_a_schedule_written_by_hand_is_timed_like_its_plan():
    plan = built("pp4 m6 1f1b")
    by_hand, from_plan = predict.timeline(plan.actions, 1.0, 2.0, 0.5), predict.timeline(plan, 1.0, 2.0, 0.5)
    assert by_hand.events == from_plan.events
    assert by_hand.plan is None


def test_two_stages_of_one_rank_send_nothing():
    trace = predict.timeline(parse_actions("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"), 1.0, 2.0, 0.5)
    assert trace.step_time_s == 3 * 4 + 4 * 0.5
    assert {(event.label, event.rank, event.peer) for event in trace.events if event.kind == "SEND_F"} == {
        ("0SEND_F0", 0, 1),
        ("2SEND_F0", 1, 0),
    }


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ("0F0", r"plan '0F0' is no Plan: use labkit.plan.build\(model, layout\), or a schedule"),
        ([["0F0", "0B0"]], "rank 0 holds '0F0': a timeline times computations"),
        (parse_actions("0F0 0SEND_F0 0B0"), "rank 0 holds Action.*adds sends itself. Use F and B, or I and W for B"),
        (parse_actions("0B0 0F0"), "the schedule stops half-way: check its actions with schedule.validate"),
    ],
)
def test_what_cannot_be_timed(actions, message):
    with pytest.raises(PlanError, match=message):
        predict.timeline(actions)


def test_the_halves_of_a_backward_take_half_each_and_the_next_stage_waits_for_the_first_only():
    trace = predict.timeline(parse_actions("0F0 0I0 0W0\n1F0 1I0 1W0"), 1.0, 2.0, 0.5)
    starts = {event.label: event.start_s for event in trace.events if "_" not in event.label}
    assert starts == {"step": 0.0, "0F0": 0.0, "1F0": 1.5, "1I0": 2.5, "1W0": 3.5, "0I0": 4.0, "0W0": 5.0}
    sends = {(event.label, event.rank, event.peer, event.start_s) for event in trace.events if "_" in event.label}
    assert sends == {
        ("0SEND_F0", 0, 1, 1.0), ("1RECV_F0", 1, 0, 1.0), ("1SEND_B0", 1, 0, 3.5), ("0RECV_B0", 0, 1, 3.5)
    }  # fmt: skip


@given(st.integers(2, 4), st.integers(1, 4), st.integers(2, 4), st.sampled_from(["interleaved", "looped_bfs"]))
def test_the_bubble_of_interleaved_schedules_is_the_theory_s(pp, rounds, v, name):
    layout = Layout(pp=pp, num_microbatches=pp * rounds, schedule=name, num_virtual_stages=v)
    trace = predict.timeline(planning.build(MODEL, layout), 1.0, 2.0)
    assert trace.bubble_fraction == pytest.approx((pp - 1) / (v * pp * rounds + pp - 1))


@pytest.mark.parametrize("name", ["zbv", "dualpipe_v", "interleaved_zero_bubble"])
def test_split_backwards_leave_a_smaller_bubble(name):
    split = predict.timeline(built(f"pp4 {name} v2 m8"), 1.0, 2.0).bubble_fraction
    assert split < predict.timeline(built("pp4 interleaved v2 m8"), 1.0, 2.0).bubble_fraction
    assert split < predict.timeline(built("pp4 m8"), 1.0, 2.0).bubble_fraction / 3


@pytest.mark.parametrize("text", ["dp2 pp2 zbv v2", "tp2 pp2 looped_bfs v3 m3", "pp4 dualpipe_v v2 m9"])
def test_every_rank_does_its_line_whatever_it_holds(text):
    plan = built(text)
    trace = predict.timeline(plan, 1.0, 2.0, send_s=0.25)
    for rank in range(plan.world_size):
        compute = [event for event in trace.of_rank(rank).events if event.kind in ("F", "B", "I", "W")]
        assert [event.label for event in compute] == [str(each) for each in plan.actions[plan.placement(rank).pp_rank]]
        assert {event.stage for event in compute} == set(plan.stages(rank))
        assert all(one.end_s <= two.start_s for one, two in itertools.pairwise(compute))
