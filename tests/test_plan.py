import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from labkit import plan as planning
from labkit import schedule
from labkit.errors import PlanError
from labkit.plan import AXES, Plan
from labkit.spec import Layout, Model

SMALL = {"num_layers": 8, "d_model": 96, "num_heads": 12, "vocab_size": 240, "seq_len": 32, "d_ff": 240}


def small(**fields):
    return Model(**SMALL | fields)


def built(text, **fields):
    return planning.build(small(**fields), Layout.parse(text))


DEGREES = {"dp": st.integers(1, 5), "tp": st.sampled_from([1, 2, 3, 4, 6]), "pp": st.integers(1, 8)}
KINDS = {
    "norm": st.sampled_from(["rms", "layer"]),
    "position": st.sampled_from(["rope", "learned"]),
    "activation": st.sampled_from(["swiglu", "gelu"]),
    "bias": st.booleans(),
    "tied_embeddings": st.booleans(),
}


@given(st.builds(Layout, **DEGREES))
def test_every_rank_has_one_place(layout):
    plan = planning.build(small(), layout)
    places = [plan.placement(rank) for rank in range(plan.world_size)]
    assert len(set(places)) == layout.dp * layout.tp * layout.pp
    for rank, place in enumerate(places):
        assert plan.rank_at(**place._asdict()) == rank
        assert rank == (place.pp_rank * layout.dp + place.dp_rank) * layout.tp + place.tp_rank


@given(st.builds(Layout, **DEGREES))
def test_groups_of_an_axis_partition_the_ranks(layout):
    plan = planning.build(small(), layout)
    for axis in AXES:
        groups = plan.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
        for group in groups:
            assert [getattr(plan.placement(rank), f"{axis}_rank") for rank in group] == list(
                range(getattr(layout, axis))
            )
            assert all(plan.group_ranks(axis, rank) == group for rank in group)


@given(st.integers(1, 40), st.integers(1, 16))
def test_layers_are_split_once_and_evenly(num_layers, pp):
    assume(num_layers >= pp)
    plan = planning.build(small(num_layers=num_layers), Layout(pp=pp))
    spans = [plan.layers(stage) for stage in range(pp)]
    assert [layer for span in spans for layer in span] == list(range(num_layers))
    sizes = [len(span) for span in spans]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.builds(small, **KINDS), st.integers(1, 8))
def test_stages_hold_every_parameter_once(model, pp):
    plan = planning.build(model, Layout(pp=pp))
    held = sum(plan.num_parameters(rank) for rank in range(pp))
    copies = model.vocab_size * model.d_model if model.tied_embeddings and pp > 1 else 0
    assert held == model.num_parameters + copies


@given(st.builds(small, **KINDS), st.sampled_from([2, 3, 4, 6]))
def test_tensor_parallel_ranks_split_matrices_and_copy_the_rest(model, tp):
    plan = planning.build(model, Layout(tp=tp))
    norms = (2 * model.num_layers + 1) * model.num_norm_parameters
    row_biases = 2 * model.d_model * model.num_layers if model.bias else 0
    positions = model.seq_len * model.d_model if model.position == "learned" else 0
    copied = norms + row_biases + positions
    assert plan.num_parameters(0) * tp == model.num_parameters + (tp - 1) * copied


def test_actions_are_the_schedule():
    assert built("pp4 m8 gpipe").actions == schedule.gpipe(4, 8)
    assert built("dp2 pp4 m8").actions == schedule.one_f_one_b(4, 8)
    plan = built("pp2")
    plan.actions[0].clear()
    assert plan.actions == schedule.one_f_one_b(2, 4)


def test_without_a_pipeline_microbatches_go_one_by_one():
    for name in ("gpipe", "1f1b"):
        assert schedule.format_actions(built(f"dp2 m2 {name}").actions) == "0F0 0B0 0F1 0B1"


def test_tokens_and_flops():
    plan = built("dp2 tp2 pp2 m4 b3")
    assert plan.tokens_per_step == 2 * 4 * 3 * 32
    assert plan.flops_per_step == plan.tokens_per_step * plan.model.flops_per_token


HEADS = r"^num_heads=6 is not divisible by tp=4: a tensor-parallel rank owns whole heads\. Use tp=1, 2, 3 or 6\.$"


@pytest.mark.parametrize(
    ("fields", "text", "message"),
    [
        ({"num_heads": 6, "d_ff": 240}, "tp4", HEADS),
        ({"num_kv_heads": 2}, "tp4", r"num_kv_heads=2 is not divisible by tp=4: .*\. Use tp=1 or 2\."),
        ({"d_ff": 250}, "tp4", r"d_ff=250 is not divisible by tp=4: .*Use tp=1 or 2.*, or d_ff=252\."),
        ({"vocab_size": 257}, "tp2", r"vocab_size=257 is not divisible by tp=2: .*Use tp=1, or vocab_size=258\."),
        ({"num_heads": 6, "vocab_size": 256}, "tp4", r"1, 2, 3 or 6 \(with d_ff=240 and vocab_size=256: 1 or 2\)\."),
        ({}, "pp9", r"num_layers=8 is fewer than pp=9: every stage holds a layer\. Use pp=8 or num_layers=9\."),
        ({}, "pp8 interleaved v2 m8", r"pp=8 \* num_virtual_stages=2 = 16 stages: .* Use pp=4 or num_layers=16\."),
        (
            {"num_layers": 3},
            "pp2 zbv v2",
            r"num_layers=3 is fewer than pp=2 \* .* = 4 stages: .* Use 1f1b without v, or num_layers=4\.",
        ),
        ({}, "pp2 v2", r"num_virtual_stages=2 with schedule='1f1b': that schedule has one stage per rank\. Use v1\."),
        ({}, "pp2 interleaved", r"num_virtual_stages=1 with schedule='interleaved': .* Use v2\."),
        ({}, "pp2 zbv v4", r"num_virtual_stages=4 with schedule='zbv': a V has two stages per rank\. Use v2\."),
        ({}, "interleaved v2", r"pp=1 with schedule='interleaved': .* Use pp2 or 1f1b\."),
        ({}, "pp4 interleaved v2 m6", r"num_microbatches=6 is not divisible by pp=4: .* Use m8\."),
        ({}, "pp4 dualpipe_v v2 m6", r"num_microbatches=6 is fewer than the 8 stages of pp=4 .* Use m8\."),
        ({}, "pp2 own", r"schedule='own' without one: .* labkit.plan.build\(model, layout, schedule=text\)\."),
        ({}, "own v2", r"pp=1 with schedule='own': it orders a pipeline, 2 ranks or more\. Use pp2 or 1f1b\."),
        ({}, "dp6 zero3 hybrid4", r"dp=6 is not divisible by hybrid=4: .* Use hybrid=1, 2, 3 or 6\."),
        ({}, "dp2 hybrid2", r"hybrid=2 with zero_stage=0: .* Use zero3 or drop it\."),
        ({}, "sp", r"sequence_parallel=True with tp=1: .* Use tp2 or leave sp out\."),
        ({"seq_len": 33}, "tp2 sp", r"seq_len=33 is not divisible by tp=2: .* Use seq_len=34\."),
        ({}, "dp2 zero1 reshard", r"reshard with zero_stage=1: .* Use zero3 or drop it\."),
        ({}, "dp2 zero1 offload:all", r"offload='all' with zero_stage=1: .* Use zero3 or offload:optimizer\."),
    ],
)  # fmt: skip
def test_impossible_layouts_say_both_numbers_the_rule_and_the_fix(fields, text, message):
    with pytest.raises(PlanError, match=message):
        built(text, **fields)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("tp2 sp deepspeed", "tp2 sp"),
        ("pp2 gpipe zero1 offload:optimizer", "pp2 zero1 gpipe m4"),
        ("dp2 tp2 zero3 offload:all", "dp2 tp2 zero3"),
        ("dp2 zero3 no_reshard deepspeed", "dp2 zero3 no_reshard"),
        ("dp4 zero3 hybrid2 offload:all", "dp4 zero3 offload:all"),
        ("dp2 zero1 offload:optimizer torch", "dp2 zero1 offload:optimizer"),
        ("dp2 offload:optimizer", "dp2 zero1 offload:optimizer"),
    ],
)
def test_what_no_engine_runs_names_the_nearest_that_one_does(text, nearest):
    with pytest.raises(PlanError, match=f": .* Use '{nearest}'"):
        built(text)
    built(nearest)


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("dp4", "torch"),
        ("dp4 deepspeed", "deepspeed"),
        ("dp1 zero3", "torch"),
        ("dp1 zero3 deepspeed", "deepspeed"),
        ("dp4 zero1", "deepspeed"),
        ("dp4 zero3", "deepspeed"),
        ("dp4 zero3 torch", "torch"),
        ("dp4 zero3 no_reshard", "torch"),
        ("dp4 zero2 reshard", "torch"),
        ("dp4 zero3 hybrid2", "torch"),
        ("dp2 tp2 zero3", "torch"),
        ("dp2 pp2 zero1", "torch"),
        ("dp1 zero1 offload:optimizer", "deepspeed"),
        ("dp2 zero3 offload:all", "deepspeed"),
    ],
)
def test_the_engine_that_runs_a_layout(text, engine):
    assert built(text).engine == engine


@given(st.builds(Layout, **DEGREES | {"num_virtual_stages": st.integers(1, 3), "zero_stage": st.integers(0, 3)}))
def test_build_gives_a_plan_or_a_plan_error(layout):
    try:
        plan = planning.build(small(), layout)
    except PlanError:
        return
    assert plan.layout == layout


@pytest.mark.parametrize("wrong", [None, "tiny", {}, 3, Layout()])
def test_no_model(wrong):
    with pytest.raises(PlanError, match="is no Model"):
        planning.build(wrong, Layout())


@pytest.mark.parametrize("wrong", [None, "dp2", {}, 3, Model.preset("tiny")])
def test_no_layout(wrong):
    with pytest.raises(PlanError, match="is no Layout"):
        planning.build(small(), wrong)


def test_no_such_rank_axis_or_stage():
    plan = built("dp2 pp2")
    for rank in (4, -1, 1.0, True, None, "0", 10**5000):
        with pytest.raises(PlanError, match="rank="):
            plan.placement(rank)
    with pytest.raises(PlanError, match=r"rank=4 but layout 'dp2 pp2 1f1b m4' takes 4 ranks: ranks end at 3\."):
        plan.group_ranks("dp", 4)
    with pytest.raises(PlanError, match="axis='ddp' is unknown: axis is 'pp', 'dp' or 'tp'"):
        plan.group_ranks("ddp", 0)
    for stage in (2, -1, None):
        with pytest.raises(PlanError, match="stage="):
            plan.layers(stage)


def test_summary_shows_every_rank_or_elides():
    lines = built("dp2 tp2 pp2").summary().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("dp2 tp2 pp2 1f1b m4 on 8 ranks, engine torch: 8 layers")
    assert lines[-1].split()[:5] == ["7", "1", "1", "1", "4-7"]
    assert len(built("dp64 tp6 pp8").summary().splitlines()) == 19
    page = built("pp8")._repr_html_()
    assert page.count("<tr>") == 9
    assert "<td>7</td>" in page


def test_under_zero_the_summary_says_what_ranks_hold():
    lines = built("dp4 zero3").summary().splitlines()
    assert lines[1].split("  ")[-3:] == ["weights held", "gradients held", "states held"]
    holding = built("dp4 zero3").holding(0)
    assert lines[2].split()[-3:] == [f"{count:,}" for count in holding]
    assert "<th>states held</th>" in built("dp4 zero1")._repr_html_()
    assert "held" not in built("dp4").summary()


@given(st.builds(small, **KINDS), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4, 6]), st.sampled_from([1, 2]))
def test_shards_of_all_ranks_are_the_whole(model, zero_stage, num_shards, hybrid):
    hybrid = hybrid if zero_stage > 1 else 1
    plan = planning.build(model, Layout(dp=num_shards * hybrid, zero_stage=zero_stage, engine="torch", hybrid=hybrid))
    holdings = [plan.holding(rank) for rank in range(num_shards)]
    assert sum(one.optimizer for one in holdings) == model.num_parameters
    assert plan.holding(plan.world_size - 1) == holdings[-1]
    if zero_stage > 1:
        assert sum(one.gradients for one in holdings) == model.num_parameters
    expected = [one.optimizer for one in holdings] if zero_stage == 3 else [model.num_parameters] * num_shards
    assert [one.parameters for one in holdings] == expected


def test_a_plan_is_a_value():
    plan = built("dp2 pp2")
    assert pickle.loads(pickle.dumps(plan)) == plan == Plan(model=small(), layout=Layout.parse("dp2 pp2"))
    assert len({plan, built("pp2 dp2")}) == 1


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("pp2 interleaved v3 m2", [[0, 2, 4], [1, 3, 5]]),
        ("pp4 zbv v2", [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("pp2 looped_bfs v2", [[0, 2], [1, 3]]),
        ("pp2 dualpipe_v v2", [[0, 3], [1, 2]]),
    ],
)
def test_ranks_hold_several_stages(text, stages):
    plan = built(text)
    assert [plan.stages(rank) for rank in range(plan.world_size)] == stages
    assert [layer for stage in range(plan.num_stages) for layer in plan.layers(stage)] == list(range(8))
    assert all(stage in plan.stages(plan.pp_rank_of(stage)) for stage in range(plan.num_stages))
    for rank, line in enumerate(plan.actions):
        assert sorted({action.stage for action in line}) == plan.stages(rank)
    held = sum(plan.num_parameters(rank) for rank in range(plan.world_size))
    assert held == plan.model.num_parameters


OWN = """
0F0 0F1 3F0 3I0 3W0 3F1 3B1 0B0 0B1
1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
"""


def test_a_schedule_of_one_s_own_is_a_plan():
    plan = planning.build(small(), Layout.parse("pp2 v2 m2"), schedule=OWN)
    assert str(plan.layout) == "pp2 own v2 m2"
    assert plan.actions == schedule.parse_actions(OWN)
    assert [plan.stages(rank) for rank in range(2)] == [[0, 3], [1, 2]]
    lists = [line.split() for line in OWN.strip().splitlines()]
    for form in (lists, schedule.parse_actions(OWN)):
        assert planning.build(small(), Layout.parse("pp2 own v2 m2"), schedule=form) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert len({plan}) == 1


@pytest.mark.parametrize(
    ("text", "own", "message"),
    [
        ("pp2 m1", "0F0 0B0", r"the schedule has 1 line but pp=2: it has one line for each pp rank\. Use pp1\."),
        ("pp2 m1", "0F0 0B0\n1F0", "1B0 is missing"),
        ("pp2 m1", "0F0 0B0\n1B0 1F0", "rank 1 waits at 1B0 for 1F0: no rank can go on. Put 1F0 before 1B0"),
        ("pp2 m1", "0F0 0SEND_F0 0B0\n1F0 1B0", "line 0 of the schedule holds 0SEND_F0: ranks add sends and receives"),
        ("pp2 m1", "0F0 0B0\nforward", "'forward' is not an action"),
        ("pp2 m2", "0F0 0B0\n1F0 1B0", r"the schedule has 1 micro-batch but num_microbatches=2: .* Use m1\."),
        ("pp2 m1", OWN, r"the schedule has 4 stages but pp=2 \* num_virtual_stages=1 = 2: .* Use v2\."),
        ("pp2 v2 m1", "0F0 1F0 2F0 2B0 1B0 0B0\n3F0 3B0", r"line 0 of the schedule holds 3 stages \[0, 1, 2\] but "),
        ("pp2 m1", 7, "schedule 7 is neither text nor a list per rank"),
        ("pp2 m1", [["0F0", 3], []], "3 is not an action"),
        ("dp2", "0F0 0B0", "pp=1 with schedule='own'"),
    ],
)
def test_what_is_no_schedule_for_a_layout(text, own, message):
    with pytest.raises(PlanError, match=message):
        planning.build(small(), Layout.parse(text), schedule=own)
