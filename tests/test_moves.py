"""Who holds what under a plan, and what goes where when the plan changes: plain values."""

from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from labkit import plan as planning
from labkit import show
from labkit.errors import PlanError
from labkit.plan.parameters import of_stage
from labkit.plan.shards import Box, of_rank, parameters
from labkit.spec import Layout, Model

MODELS = [
    Model(num_layers=5, d_model=24, num_heads=4, vocab_size=36, seq_len=8, d_ff=28),
    Model(
        num_layers=4, d_model=16, num_heads=4, num_kv_heads=2, vocab_size=20, seq_len=6, norm="layer",
        position="learned", activation="gelu", bias=True, tied_embeddings=True,
    ),
]  # fmt: skip
LAYOUTS = st.builds(
    dict,
    dp=st.sampled_from([1, 2, 3, 4, 5]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    zero_stage=st.integers(0, 3),
    hybrid=st.sampled_from([1, 1, 2]),
    schedule=st.sampled_from(["1f1b", "interleaved", "zbv"]),
    engine=st.sampled_from(["auto", "torch"]),  # left to choose, ZeRO over dp alone is DeepSpeed's
)


def plan_of(model, fields):
    v_shaped = fields["schedule"] != "1f1b"
    try:
        return planning.build(model, Layout(**fields, num_virtual_stages=2 if v_shaped else 1))
    except PlanError:
        assume(False)


def elements(boxes):
    return [
        (row, column) for box in boxes for row in range(box.top, box.bottom) for column in range(box.left, box.right)
    ]


@given(st.sampled_from(MODELS), LAYOUTS)
def test_shards_are_what_a_plan_counts(model, fields):
    plan = plan_of(model, fields | {"zero_stage": 0, "hybrid": 1})
    for rank in range(plan.world_size):
        held = sum(box.num_elements for shard in of_rank(plan, rank) for box in shard.weights)
        assert held == plan.num_parameters(rank)
    assert sum(one.num_elements for one in parameters(plan)) == model.num_parameters


@given(st.sampled_from(MODELS), LAYOUTS)
def test_shards_of_all_ranks_cover_everything(model, fields):
    plan = plan_of(model, fields)
    for kind in ("weights", "states"):
        found = {}
        for rank in range(plan.world_size):
            for shard in of_rank(plan, rank):
                own = elements(getattr(shard, kind))
                assert len(own) == len(set(own))
                found.setdefault(shard.name, set()).update(own)
        assert {name: len(held) for name, held in found.items()} == {
            one.name: one.num_elements for one in parameters(plan)
        }


@given(st.sampled_from(MODELS), LAYOUTS, LAYOUTS)
def test_every_rank_gets_each_of_its_elements_once_from_one_that_holds_it(model, before, after):
    moves = planning.moves(plan_of(model, before), plan_of(model, after))
    held = {(rank, s.key): s for rank in range(moves.before.world_size) for s in of_rank(moves.before, rank)}
    wanted = {(rank, s.key): s for rank in range(moves.after.world_size) for s in of_rank(moves.after, rank)}
    names = [one.name for one in parameters(moves.after)]
    for quantity, kind in (("weight", "weights"), ("exp_avg", "states")):
        arrived = {key: [] for key in wanted}
        for move in (move for name in names for move in moves.of(name, quantity)):
            source = getattr(held[move.source, move.source_key], kind)
            target = getattr(wanted[move.target, move.target_key], kind)
            assert move.box.cut(source[move.source_box]) == move.box == move.box.cut(target[move.target_box])
            arrived[move.target, move.target_key].append(move.box)
            if move.source != move.target:  # a rank fetches nothing that it has
                name = wanted[move.target, move.target_key].name
                own = [s for (rank, _), s in held.items() if rank == move.target and s.name == name]
                assert not any(move.box.cut(box) for shard in own for box in getattr(shard, kind))
        for key, boxes in arrived.items():
            assert sorted(elements(boxes)) == sorted(elements(getattr(wanted[key], kind)))


def test_replicas_share_the_sending():
    model = MODELS[0]
    moves = planning.moves(*(planning.build(model, Layout.parse(text)) for text in ("dp2 torch", "dp4 torch")))
    assert moves.matrix[0][2] == moves.matrix[1][3] == 12 * model.num_parameters
    assert moves.num_bytes == 2 * 12 * model.num_parameters
    assert moves.matrix[0][3] == moves.matrix[1][2] == 0
    assert sum(map(sum, moves.matrix)) == 4 * 12 * model.num_parameters


def test_sgd_moves_weights_alone():
    model = MODELS[0]
    plans = [planning.build(model, Layout.parse(text)) for text in ("dp1", "dp2")]
    assert planning.moves(*plans, "sgd").num_bytes == 4 * model.num_parameters


def test_batches_are_bounded_and_complete():
    plan = planning.build(MODELS[1], Layout.parse("tp2"))
    moves = planning.moves(plan, plan)
    sizes = {one.name: 4 * one.num_elements for one in parameters(plan)}
    batches = list(moves.batches(3000))
    assert [one for batch in batches for one in batch] == [(n, q) for n in sizes for q in moves.quantities]
    assert all(len(batch) == 1 or sum(sizes[name] for name, _ in batch) <= 3000 for batch in batches)
    assert len(batches) > 2


def test_a_tied_matrix_stands_at_both_ends():
    plan = planning.build(MODELS[1], Layout.parse("pp2 zbv v2 m4"))
    twins = [shard for shard in of_rank(plan, 0) if shard.name == "embedding.weight"]
    assert [shard.key for shard in twins] == ["embedding.weight", "head.weight"]
    assert [one.name for one in of_stage(plan, 3)][-1] == "head.weight"
    assert twins[0].weights == (Box(0, 20, 0, 16),)


def test_only_one_model_is_laid_out_anew():
    plans = [planning.build(model, Layout.parse("dp2")) for model in MODELS]
    with pytest.raises(PlanError, match="Build the plan from that model"):
        planning.moves(*plans)
    with pytest.raises(PlanError, match="optimizer"):
        planning.moves(plans[0], plans[0], "adam")


def test_a_picture_of_the_bytes():
    plans = [planning.build(MODELS[0], Layout.parse(text)) for text in ("dp2", "pp2 dp2")]
    moves = planning.moves(*plans)
    figure = show.switch(moves)
    goes, stays = figure.data
    for a, row in enumerate(moves.matrix):
        for b, size in enumerate(row):
            assert (stays if a == b else goes).z[a][b] == (size or None)
            assert (goes if a == b else stays).z[a][b] is None
    assert figure.layout.title.text.startswith("<b>dp2 → dp2 pp2 1f1b m4</b>")
    assert goes.customdata[0][2].startswith("rank 2 takes ")
    assert show.switch(SimpleNamespace(moves=moves)).layout.title == figure.layout.title
    with pytest.raises(PlanError, match=r"lk\.plan\.moves"):
        show.switch(plans[0])
