"""Predicted memory: its sums, how it moves with the layout, what a micro-batch keeps. Starts no rank."""

import json
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._backward import stage_backward_input

from labkit import plan as planning
from labkit import predict
from labkit.errors import PlanError
from labkit.predict.activations import layer_bytes, split_backward_bytes, stage_bytes
from labkit.predict.in_flight import steps
from labkit.predict.sizes import stage_holding
from labkit.rank.model import mean_loss
from labkit.rank.parameters import build_stage
from labkit.schedule import BUILDERS
from labkit.spec import Layout, Model

TINY = Model.preset("tiny")
KINDS = (
    Model(num_layers=4, d_model=64, num_heads=4, num_kv_heads=2, vocab_size=64, seq_len=16),
    Model(
        num_layers=4,
        d_model=32,
        num_heads=2,
        vocab_size=48,
        seq_len=16,
        norm="layer",
        position="learned",
        activation="gelu",
        bias=True,
    ),
)
CPU = torch.device("cpu")


def built(text, model=TINY):
    return planning.build(model, Layout.parse(text))


def first(text, model=TINY):
    return predict.memory(built(text, model))[0]


# Every schedule, ZeRO stage, precision, form of recomputation and of offload, on both engines.
LAYOUTS = (
    "dp1", "dp1 m3 b2", "dp4", "dp4 bf16 m2", "tp2 fp8", "tp2 dp2 sp", "dp4 zero1", "dp4 zero1 torch", "dp4 zero2",
    "dp4 zero2 torch reshard", "dp4 zero3", "dp4 zero3 torch", "dp4 zero3 hybrid2", "dp4 zero3 no_reshard",
    "dp4 zero2 offload:optimizer", "dp4 zero3 offload:all", "dp2 tp2 zero3 sp bf16", "dp2 tp2 zero1 recompute:full",
    "pp4 m8 gpipe", "pp4 m8 bf16 recompute:selective", "pp2 interleaved v2", "pp2 looped_bfs v2 m3",
    "pp2 interleaved_zero_bubble v2", "pp2 zbv v2", "pp2 dualpipe_v v2", "dp2 pp2 zbv v2 recompute:full",
    "dp2 pp2 zero2", "dp2 pp2 zero1 deepspeed",
)  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_layout_has_memory_whose_parts_add_up(text, optimizer):
    plan = built(text)
    found = predict.memory(plan, optimizer=optimizer)
    assert len(found) == plan.world_size
    for rank, one in enumerate(found):
        assert one.rank == rank
        assert one.states == predict.state_bytes(plan, rank, optimizer)
        categories = {name: getattr(one, name) for name in predict.CATEGORIES}
        assert sum(one.at_peak.values()) == one.peak <= sum(categories.values())
        assert all(0 <= one.at_peak[name] <= categories[name] for name in categories)
        assert sum(one.activations_by_kind.values()) == one.activations > 0
        assert all(size > 0 for size in one.activations_by_kind.values())
        assert (one.host > 0) == (plan.layout.offload != "none")
        assert 0 <= one.host < one.peak
    assert found.largest.peak - found.largest.host == max(one.peak - one.host for one in found)


def test_ranks_with_less_of_a_shard_have_less():
    odd = Model(num_layers=3, d_model=15, num_heads=3, vocab_size=257, seq_len=16, d_ff=37, position="learned")
    found = predict.memory(built("dp4 zero3 torch", odd))
    assert found[0].states > found[3].states
    assert found[-1] == found[3]
    assert [one.rank for one in found[1:3]] == [1, 2]
    with pytest.raises(IndexError, match="rank 4 of a plan with 4 ranks"):
        found[4]


def saved(stage, x, targets):
    """Bytes that autograd keeps of a stage's forward, without its parameters and its input."""
    known = {one.untyped_storage().data_ptr() for one in (*stage.parameters(), x, targets)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = stage(x)
        loss = out if stage.head is None else mean_loss(out, targets)
    if stage._rotation_SK is not None:
        kept.pop(stage._rotation_SK.untyped_storage().data_ptr(), None)
    assert loss.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("recompute", ["", "recompute:selective", "recompute:full"])
@pytest.mark.parametrize("model", KINDS, ids=["llama", "gpt"])
def test_a_micro_batch_keeps_to_the_byte_what_autograd_saves(model, precision, recompute):
    generator = torch.Generator().manual_seed(0)
    for pipeline in ("", "pp2 m2"):
        plan = built(f"b2 {precision} {recompute} {pipeline}", model)
        tokens, targets = torch.randint(model.vocab_size, (2, 2, model.seq_len), generator=generator)
        for stage in range(plan.num_stages):
            stream = torch.randn(2, model.seq_len, model.d_model, generator=generator, requires_grad=True)
            found = saved(build_stage(plan, stage, 0, CPU), tokens.clone() if stage == 0 else stream, targets.clone())
            predicted = stage_bytes(plan, stage)
            assert sum(predicted.values()) - predicted.get("stage outputs", 0) == found


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v"]),
    st.integers(2, 4),
    st.integers(2, 3),
    st.integers(1, 8),
)
def test_the_part_of_a_schedule_that_is_looked_at_holds_as_much_as_all_of_it(name, pp, v, rounds):
    v = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipe_v": 2}.get(name, v)
    m = rounds * pp if name != "dualpipe_v" else (rounds + 1) * pp
    model = replace(TINY, num_layers=pp * v + 1)
    plan = built(f"pp{pp} {name} v{v} m{m}".replace(" v1 ", " "), model)
    as_own = replace(plan, schedule=tuple(tuple(line) for line in plan.actions))
    for rank in range(pp):
        quick, whole = predict.memory(plan)[rank], predict.memory(as_own)[rank]
        assert replace(quick, peak_at="") == replace(whole, peak_at="")
        assert len(list(steps(plan, rank))) <= len(plan.actions[rank])


def test_a_stage_holds_as_many_micro_batches_as_its_schedule_says():
    plan = built("pp4 m8")
    found = [one.activations_by_kind["attention"] for one in predict.memory(plan)]
    each = layer_bytes(plan.model, plan.layout)["attention"]
    assert found == [4 * each, 3 * each, 2 * each, each]
    assert set(BUILDERS) == {
        "gpipe",
        "1f1b",
        "interleaved",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv",
        "dualpipe_v",
    }
    assert first("pp4 m8 gpipe").activations_by_kind["attention"] == 8 * each


def test_more_of_an_axis_is_never_more_state():
    for one, two in (("dp1", "tp2"), ("tp2", "tp4"), ("dp1", "pp2"), ("pp2", "pp4")):
        assert first(one).states > first(two).states, (one, two)
    for one, two in (("dp4", "dp4 zero1"), ("dp4 zero1", "dp4 zero2"), ("dp4 zero2", "dp4 zero3")):
        less, more = first(f"{two} torch"), first(f"{one} torch")
        assert more.states > less.states, (one, two)
        assert more.optimizer >= less.optimizer
        assert more.gradients >= less.gradients
    assert first("dp4 zero3 torch").activations == first("dp4").activations


def test_recomputation_and_parallelism_leave_less_activations():
    for shorter, longer in (
        ("recompute:selective", "dp1"),
        ("recompute:full", "recompute:selective"),
        ("tp2", "dp1"),
        ("tp2 sp", "tp2"),
        ("tp4 sp recompute:full", "tp4 recompute:full"),
    ):
        assert first(shorter).activations < first(longer).activations
    assert first("b2").activations == pytest.approx(2 * first("dp1").activations, rel=1e-5)
    assert first("dp1 m8").activations == first("dp1").activations
    assert first("recompute:full").temporary > first("dp1").temporary


@pytest.mark.parametrize(
    "text", ["dp2 pp2 zero1 m4", "tp2 pp2", "dp4 zero3 torch", "dp2 pp2 zero1 deepspeed", "dp4 zero2"]
)
def test_stages_counted_by_layers_are_the_plan_s(text):
    model = Model(
        num_layers=5, d_model=24, num_heads=2, vocab_size=62, seq_len=16, d_ff=34, norm="layer", position="learned",
        activation="gelu", bias=True, tied_embeddings="deepspeed" not in text,
    )  # fmt: skip
    plan = built(text, model)
    for rank in range(plan.world_size):
        parts = [stage_holding(plan, stage, plan.placement(rank).dp_rank) for stage in plan.stages(rank)]
        assert tuple(map(sum, zip(*parts, strict=True))) == tuple(plan.holding(rank))


def test_a_large_layout_is_counted_by_its_places_alone():
    plan = built("dp128 tp8 pp16 zero1 m32 bf16 sp interleaved v7", Model.preset("llama3-405b"))
    found = predict.memory(plan)
    assert len(found) == 16_384
    assert [one.rank for one in found.distinct()] == [1024 * pp_rank for pp_rank in range(16)]
    assert found[16_383].peak == found.distinct()[-1].peak
    assert "16384 ranks" in repr(found)


def test_no_plan_and_no_optimizer_are_refused():
    with pytest.raises(PlanError, match="is no Plan: use"):
        predict.memory("dp2")
    with pytest.raises(PlanError, match="optimizer"):
        predict.memory(built("dp1"), optimizer="adam")


def test_the_nearest_layout_that_fits_changes_as_little_as_it_must():
    plan = built("dp4 tp2 bf16", Model.preset("llama2-7b"))
    needed = predict.memory(plan).largest.peak
    assert predict.fitting(plan, needed) is plan
    less = predict.fitting(plan, needed - 1)
    assert (less.layout, less.world_size) == (Layout.parse("dp4 tp2 zero1 bf16"), 8)
    least = predict.fitting(built("dp4 tp2 b4 bf16", Model.preset("llama2-7b")), 40 * 2**30)
    assert predict.memory(least).largest.peak <= 40 * 2**30
    assert least.layout.global_batch_size == 16
    with pytest.raises(PlanError, match=r"GiB on a rank and a device has 1\.0 GiB: nothing that"):
        predict.fitting(plan, 2**30)
    with pytest.raises(PlanError, match=r"a device has 0\.000931 GiB"):
        predict.fitting(plan, 10**6)
    with pytest.raises(PlanError, match="plan 'tiny' is no Plan"):
        predict.fitting("tiny", 2**30)


def held_after(function):
    """Bytes that are allocated while a function runs and still there when it is over."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        kept = function()
    events = found.profiler.kineto_results.events()
    assert kept is not None
    return sum(one.nbytes() for one in events if one.name() == "[memory]")


@pytest.mark.parametrize("text", ["b2 pp3 m3", "b2 pp3 m3 bf16", "b2 pp3 m3 fp8", "b2 pp3 m3 recompute:full"])
def test_half_a_backward_leaves_to_the_byte_what_it_says(text):
    model = replace(KINDS[0], num_layers=6)
    plan = built(text, model)
    targets = torch.zeros(2, model.seq_len, dtype=torch.int64)
    for stage in (1, 2):
        net = build_stage(plan, stage, 0, CPU)
        x = torch.randn(2, model.seq_len, model.d_model, requires_grad=True)
        coming = torch.randn_like(x)

        def half(net=net, x=x, coming=coming, is_last=stage == 2):
            out = net(x)
            loss = mean_loss(out, targets) if is_last else out
            found = stage_backward_input([loss], None if is_last else [coming], [x], iter(net.parameters()))
            return found, loss  # as torch's stage keeps them until the second half

        half()
        x.grad = None
        expected = sum(stage_bytes(plan, stage).values()) + split_backward_bytes(plan, stage) + x.numel() * 4
        assert held_after(half) == pytest.approx(expected, abs=8)  # the loss, and the ones its backward begins with


@pytest.mark.slow
def test_peaks_are_what_is_allocated():
    """In one process, whose groups send nothing: the allocator's own count."""
    layouts = ["dp4 m2", "dp2 tp2 b4", "dp4 zero3 torch m2 bf16"]
    script = pathlib.Path(__file__).with_name("allocated.py")
    done = subprocess.run([sys.executable, script, *layouts], capture_output=True, text=True, timeout=240)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["layout"] for one in found] == layouts, done.stderr[-2000:]
    for one in found:
        assert abs(one["predicted"] - one["allocated"]) < 0.04 * one["peak"], one
