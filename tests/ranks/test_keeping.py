"""What ranks keep in a step: activations follow the schedule and the splits, states are what the plan counts."""

import dataclasses

import pytest

import labkit as lk
from labkit.cluster import Ranks
from labkit.errors import PlanError
from labkit.spec import Layout, Model

pytestmark = pytest.mark.ranks

MODEL = Model(num_layers=4, d_model=32, num_heads=4, vocab_size=256, seq_len=16, d_ff=64)


def kept(ranks: Ranks, text: str, model: Model = MODEL) -> list[int]:
    return lk.measure.activations(ranks, lk.plan.build(model, Layout.parse(text)))


def test_activations_are_those_of_the_micro_batches_in_flight(ranks: Ranks) -> None:
    one = kept(ranks, "pp2 gpipe m1")
    gpipe, one_f_one_b = kept(ranks, "pp2 gpipe m4"), kept(ranks, "pp2 1f1b m4")
    for stage in range(2):
        assert gpipe[stage] == pytest.approx(4 * one[stage], rel=0.05)
        assert one_f_one_b[stage] == pytest.approx((2 - stage) * one[stage], rel=0.05)


def test_recomputation_and_splits_keep_less(ranks: Ranks) -> None:
    whole, selective, full = (kept(ranks, f"b2{text}")[0] for text in ("", " recompute:selective", " recompute:full"))
    assert full < selective < whole
    split, along_the_sequence = kept(ranks, "tp2 b2"), kept(ranks, "tp2 sp b2")
    assert whole / 2 < max(along_the_sequence) < max(split) < whole
    assert len(split) == 2


def test_activations_do_not_depend_on_weights(ranks: Ranks) -> None:
    assert kept(ranks, "dp2 zero3 torch")[0] == pytest.approx(kept(ranks, "dp2")[0], rel=0.05)


@pytest.mark.parametrize("text", ["dp4", "dp4 zero1 torch", "dp4 zero2 torch", "dp4 zero3 torch", "dp2 tp2 zero3"])
def test_states_are_what_the_plan_counts(ranks: Ranks, text: str) -> None:
    plan = lk.plan.build(MODEL, Layout.parse(text))
    found = lk.measure.states(ranks, plan)
    assert len(found) == 4
    for rank, states in enumerate(found):
        foretold = plan.holding(rank)
        # Between steps FSDP has shards of the weights, also where it keeps them whole from forward to backward.
        assert states.parameters == 4 * (foretold.parameters if plan.layout.zero_stage < 2 else foretold.optimizer)
        assert states.gradients == 4 * foretold.gradients
        assert states.optimizer == 2 * 4 * foretold.optimizer


def test_what_cannot_be_weighed_is_refused(ranks: Ranks) -> None:
    with pytest.raises(PlanError, match="takes 8 ranks but 4 are up"):
        lk.measure.activations(ranks, lk.plan.build(MODEL, Layout.parse("dp8")))
    plan = dataclasses.replace(lk.plan.build(MODEL, Layout.parse("dp4 zero1 torch")), engine="deepspeed")
    with pytest.raises(PlanError, match="only torch's steps are weighed"):
        lk.measure.states(ranks, plan)
