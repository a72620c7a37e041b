"""A predicted step: what its parts cost, what overlaps, totals that need no events."""

import itertools
import math
import pickle
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import plan as planning
from labkit import predict
from labkit.errors import PlanError
from labkit.predict import Reach, Software
from labkit.predict.costs import layer
from labkit.predict.execution import execute, totals
from labkit.schedule import BUILDERS, V_SHAPED, build
from labkit.spec import Hardware, Layout, Model
from labkit.trace import Trace

H100 = Hardware.preset("h100")
LARGE = Model.preset("llama3-70b")
SMALL = Model(num_layers=16, d_model=64, num_heads=4, vocab_size=256, seq_len=32)
MEGATRON = Software.preset("megatron")


def step(text, model=LARGE, hardware=H100, software=None):
    return predict.step(planning.build(model, Layout.parse(text)), hardware, software=software)


LAYOUTS = [
    "dp1",
    "dp2 m2",
    "dp2 tp2 pp2 m4",
    "dp2 zero1 pp2 m4 bf16",
    "dp2 zero3 bf16",
    "dp4 zero3 hybrid2 no_reshard bf16",
    "dp4 zero2 m2",
    "tp4 sp recompute:selective bf16",
    "tp2 pp2 gpipe m4 recompute:full",
    "pp4 interleaved v2 m8",
    "pp2 looped_bfs v2 m4",
    "pp2 interleaved_zero_bubble v2 m4 bf16",
    "dp2 pp2 zbv v2 m5",
    "pp2 dualpipe_v v2 m8 fp8",
    "dp2 zero3 offload:all bf16",
    "dp2 zero1 offload:optimizer",
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_totals_are_those_of_the_events(text):
    trace = step(text, SMALL)
    made = Trace(trace.events, "predicted", trace.plan)
    assert trace == made
    assert made == trace
    assert trace.num_events == made.num_events == len(trace.events)
    assert trace.step_time_s == pytest.approx(made.step_time_s, rel=1e-9)
    assert trace.bubble_fraction == pytest.approx(made.bubble_fraction, abs=1e-9)
    assert (trace.ranks, trace.steps, trace.origin) == (made.ranks, [0], "predicted")
    for rank in trace.ranks:
        assert trace.of_rank(rank) == made.of_rank(rank)
    assert max(event.end_s for event in made.events) <= trace.step_time_s * (1 + 1e-9)
    assert pickle.loads(pickle.dumps(trace)) == made
    assert Trace.from_jsonl(trace.to_jsonl()) == made
    assert trace.of_step(0) is trace


def test_a_schedule_of_ones_own_is_executed():
    plan = planning.build(SMALL, Layout.parse("pp2 m2"), schedule="0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    trace = predict.step(plan, H100)
    assert trace.step_time_s == pytest.approx(Trace(trace.events).step_time_s)
    assert trace.step_time_s == pytest.approx(step("pp2 m2", SMALL).step_time_s)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(BUILDERS)),
    st.integers(2, 4),
    st.integers(1, 12),
    st.integers(0, 3),
    st.floats(1.0, 2.0),
    st.floats(0.0, 0.3),
)
def test_a_long_schedule_repeats_its_rounds(name, num_ranks, rounds, extra, slow, send_s):
    """Executed whole or for a few rounds: the same end, for stages of which the last is slower."""
    straight = name in ("gpipe", "1f1b")
    v = 1 if straight else 2
    m = 12 * num_ranks + rounds * num_ranks + (extra if straight or name == "zbv" else 0)
    durations = {kind: [1.0] * (num_ranks * v - 1) + [slow] for kind in "FIW"}
    found = totals(name, num_ranks, m, v, durations, [send_s] * (num_ranks * v - 1))
    whole = durations | {"B": [one + two for one, two in zip(durations["I"], durations["W"], strict=True)]}
    lines = build(name, num_ranks, m, v)
    starts = execute(lines, whole, [send_s] * (num_ranks * v - 1))
    ends_s = [at[-1] + whole[line[-1].kind][line[-1].stage] for at, line in zip(starts, lines, strict=True)]
    assert max(found.ends_s) == pytest.approx(max(ends_s), rel=2e-3)
    assert 0 <= found.bubble_fraction < 1
    assert name in V_SHAPED or found.busy_s[-1] == max(found.busy_s)


def test_equal_stages_have_the_theory_s_bubble():
    even = {kind: [1.0] * 8 for kind in "FIW"}
    for m in (8, 64, 4096):
        assert totals("1f1b", 8, m, 1, even, [0.0] * 7).bubble_fraction == pytest.approx(
            predict.bubble_fraction(8, m), rel=1e-9
        )


def test_operations_of_a_layer_are_the_papers():
    gpt = Model(num_layers=1, d_model=1024, num_heads=16, vocab_size=256, seq_len=512, activation="gelu")
    plain = layer(gpt, 512, Software.preset("megatron-2021"))
    forward = 24 * 512 * 1024**2 + 4 * 512 * 512 * 1024
    assert plain.forward.product_flops == forward
    assert plain.inputs.product_flops + plain.weights.product_flops == 2 * forward
    split = layer(gpt, 512, Software.preset("megatron-2021"), tp=4)
    assert split.forward.product_flops == forward / 4
    assert split.forward.sums == ((2, 2 * 512 * 1024),)
    flash = layer(gpt, 512, MEGATRON)
    assert flash.forward.attention_flops == 2 * 512 * 512 * 1024  # half of the scores are masked
    assert flash.forward.num_bytes < plain.forward.num_bytes
    kv = layer(replace(LARGE, num_layers=1), 8192, MEGATRON)
    assert kv.weights.product_flops == 2 * 8192 * (LARGE.num_layer_parameters - 2 * LARGE.num_norm_parameters)


def test_what_costs_more_takes_longer():
    plain = step("dp8 tp8 m4 bf16").step_time_s
    assert step("dp8 tp8 m4 bf16 recompute:full").step_time_s > 1.25 * plain
    assert plain < step("dp8 tp8 m4 bf16 recompute:selective").step_time_s < 1.25 * plain
    assert step("dp8 tp8 m4").step_time_s > 5 * plain
    assert step("dp8 tp8 m4 fp8").step_time_s < plain
    assert step("dp8 tp8 m4 bf16 b2").step_time_s > 1.6 * plain
    assert step("dp8 tp8 m4 bf16", hardware=Hardware.preset("a100")).step_time_s > 2 * plain
    slow_network = Hardware.preset("h100", network="ethernet-10")
    assert step("dp8 tp8 m4 bf16", hardware=slow_network).step_time_s > 1.5 * plain
    assert step("tp8 pp8 m64 bf16", software=MEGATRON).step_time_s < step("tp8 pp8 m64 bf16").step_time_s


def test_tensor_parallelism_across_hosts_is_slow():
    near, far = step("tp8 dp2 bf16"), step("tp8 dp2 bf16", hardware=replace(H100, ranks_per_host=1))
    assert far.step_time_s > 1.3 * near.step_time_s


def test_hiding_shortens_a_step_by_what_there_is_to_hide():
    base = Software()
    assert (
        step("dp16 tp8 bf16", software=replace(base, dp_hidden=1.0)).step_time_s
        < step("dp16 tp8 bf16", software=base).step_time_s
    )
    for text in ("dp16 zero3 bf16", "dp16 zero2 bf16", "tp8 bf16"):
        times = [
            step(text, software=replace(base, dp_hidden=share, tp_hidden=share)).step_time_s for share in (0, 0.5, 1)
        ]
        assert times == sorted(times, reverse=True)
        assert times[0] > times[2]


def test_events_of_a_rank_are_in_order_and_name_their_group():
    trace = step("dp2 pp2 zero1 m4 bf16", SMALL)
    for rank in trace.ranks:
        events = trace.of_rank(rank).events
        compute = [event for event in events if event.kind in "FB"]
        assert all(one.end_s <= two.start_s * (1 + 1e-9) for one, two in itertools.pairwise(compute))
        kinds = [event.kind for event in events if event.group == "dp" or event.kind == "optimizer"]
        assert kinds == ["reduce_scatter", "optimizer", "all_gather"]
        peers = {event.peer for event in events if event.kind.startswith("SEND")}
        assert peers == {rank ^ 2}


def test_sixteen_thousand_ranks_have_totals_at_once_and_events_of_one():
    trace = step("dp128 tp8 pp16 m64 bf16 zero1 sp", Model.preset("llama3-405b"), software=MEGATRON)
    assert trace.plan.world_size == 16_384
    assert 0 < trace.bubble_fraction < 0.4
    assert trace.num_events > 2_000_000
    assert str(trace.num_events) in str(trace)
    mfu = trace.plan.flops_per_step / trace.step_time_s / 16_384 / H100.peak_flops("bf16")
    assert 0.3 < mfu < 0.65
    events = trace.of_rank(9000).events
    assert {event.rank for event in events} == {9000}
    assert trace.of_rank(9001).num_events == len(events)
    with pytest.raises(PlanError, match=r"events on 16384 ranks, and a trace holds 2000000: folded\(\)"):
        _ = trace.events
    folded = trace.folded()
    assert folded.ranks == list(range(0, 16_384, 1024))
    assert folded.step_time_s == pytest.approx(trace.step_time_s, rel=1e-3)
    assert folded.bubble_fraction == pytest.approx(trace.bubble_fraction, abs=1e-3)


def test_collectives_cost_latency_then_bytes():
    eight = Reach(8, 1)
    small = predict.collective_time("all_reduce", 8, eight, H100)
    assert 5e-6 < small < 30e-6
    large = predict.collective_time("all_reduce", 2**30, eight, H100)
    assert predict.collective_time("all_reduce", 2**31, eight, H100) == pytest.approx(2 * large, rel=0.05)
    half = predict.collective_time("reduce_scatter", 2**30, eight, replace(H100, switch_sums=False))
    assert 2 * half == pytest.approx(
        predict.collective_time("all_reduce", 2**30, eight, replace(H100, switch_sums=False)), rel=0.05
    )
    assert predict.collective_time("all_reduce", 2**30, Reach(16, 2), H100) > large
    assert predict.collective_time("all_reduce", 2**30, Reach(1, 1), H100) == 0
    times = [predict.collective_time("all_reduce", 8, Reach(8 * hosts, hosts), H100) for hosts in (2, 16, 1024)]
    assert times[0] < times[1] < times[2] < 10 * times[0]  # trees: log2 of the hosts
    with pytest.raises(PlanError, match="kind='allreduce' is unknown"):
        predict.collective_time("allreduce", 8, eight, H100)
    with pytest.raises(PlanError, match="num_bytes"):
        predict.collective_time("all_reduce", math.nan, eight, H100)


def test_what_cannot_be_predicted_is_refused():
    plan = planning.build(SMALL, Layout.parse("dp2 fp8"))
    with pytest.raises(PlanError, match=r"a100-80 has no fp8: .* Use precision='bf16'"):
        predict.step(plan, Hardware.preset("a100"))
    with pytest.raises(PlanError, match="plan 'dp2' is no Plan"):
        predict.step("dp2", H100)
    with pytest.raises(PlanError, match="hardware 'h100' is no Hardware"):
        predict.step(plan, "h100")
    with pytest.raises(PlanError, match="software 'megatron' is no Software"):
        predict.step(plan, H100, software="megatron")
    with pytest.raises(PlanError, match=r"software 'megatrn' is unknown: .* Did you mean 'megatron'\?"):
        Software.preset("megatrn")
    with pytest.raises(PlanError, match=r"tp_hidden=1\.5 is above 1"):
        Software(tp_hidden=1.5)
    with pytest.raises(PlanError, match="stream_bytes=16 is above 8"):
        Software(stream_bytes=16)


@pytest.mark.parametrize("text", ["tp2", "tp2 bf16 m2", "tp4 pp2 m4 bf16", "dp2 tp2 pp2 m4 gpipe"])
def test_sums_over_tp_are_those_that_traffic_counts(text):
    plan = planning.build(SMALL, Layout.parse(text))
    trace = predict.step(plan, H100)
    for rank in trace.ranks:
        counted = Counter()
        for one in predict.traffic(plan, rank):
            if one.axis == "tp":
                counted[one.num_bytes] += one.num_calls
        events = [event for event in trace.of_rank(rank).events if event.group == "tp"]
        assert Counter(event.num_bytes for event in events) == counted
        assert {event.kind for event in events} == {"all_reduce"}
        for event in events:
            within = [one for one in trace.of_rank(rank).events if one.kind in ("F", "B")]
            assert any(one.start_s <= event.start_s + 1e-12 and event.end_s <= one.end_s + 1e-12 for one in within)


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 9, 64])
def test_hosts_of_a_group_are_counted_without_its_ranks(stride):
    for num_ranks in (1, 2, 7, 8, 24):
        for ranks_per_host in (1, 3, 4, 8, 72):
            hosts = {place * stride // ranks_per_host for place in range(num_ranks)}
            assert predict.reach(num_ranks, stride, ranks_per_host).num_hosts == len(hosts)
    assert predict.reach(2**31 - 1, stride, 8).num_hosts <= 2**31 - 1


def test_links_of_nobody_are_refused():
    h100 = Hardware.preset("h100")
    for wrong in (None, 0, 1.5, "8"):
        with pytest.raises(PlanError, match="num_ranks="):
            predict.reach(wrong, 1, 8)
        with pytest.raises(PlanError, match="is no Reach"):
            predict.collective_time("send", 1, wrong, h100)
        with pytest.raises(PlanError, match="is no Hardware"):
            predict.collective_time("send", 1, Reach(2, 1), wrong)


def test_the_trace_of_a_rank_that_is_none_is_empty():
    trace = predict.step(planning.build(Model.preset("tiny"), Layout.parse("dp2")), Hardware.preset("h100"))
    assert [trace.of_rank(rank).events for rank in (None, "0", -1, 2, 0.5)] == [()] * 5
    assert trace.of_rank(1).ranks == [1]
