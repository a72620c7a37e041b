"""The cockpit's controls reach only layouts that exist, and say why another does not."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import plan, widgets
from labkit.errors import PlanError
from labkit.spec import Layout, Model
from labkit.widgets.choices import AXES, WORDS, Choices, Refusal

TINY = Model.preset("tiny")

DEGREES = st.integers(1, 16)
wishes = st.builds(
    Layout,
    dp=DEGREES,
    tp=DEGREES,
    pp=DEGREES,
    num_microbatches=st.integers(1, 64),
    num_virtual_stages=st.integers(1, 4),
    **{axis: st.sampled_from(options) for axis, options in WORDS.items()},
)


@settings(max_examples=15)
@given(wishes, st.integers(1, 12), st.sampled_from([None, *AXES]))
def test_any_wish_leads_to_a_layout_that_exists(wish: Layout, num_ranks: int, moved: str | None) -> None:
    choices = Choices.of(num_ranks, TINY)
    layout = choices.nearest(wish, moved)
    plan.build(TINY, layout)
    assert layout.world_size == choices.num_ranks <= num_ranks
    assert layout.global_batch_size == choices.global_batch_size
    assert choices.nearest(layout, moved) == layout


@settings(max_examples=20)
@given(wishes, st.sampled_from([1, 2, 4, 6]), st.sampled_from(AXES), st.data())
def test_a_moved_control_stays_or_is_refused_with_a_reason(
    wish: Layout, num_ranks: int, axis: str, data: st.DataObject
) -> None:
    choices = Choices.of(num_ranks, TINY)
    start = choices.nearest(wish)
    value = data.draw(st.sampled_from(choices.values(axis)))
    answer = choices.follow(replace(start, **{axis: value}), axis)
    assert getattr(answer.wish if isinstance(answer, Refusal) else answer, axis) == value
    words = [name for name in WORDS if name != axis]
    layout = answer
    if isinstance(answer, Refusal):
        with pytest.raises(PlanError) as error:
            plan.build(TINY, answer.wish)
        assert answer.reason == str(error.value)
        layout = answer.nearest
    else:
        assert [getattr(answer, name) for name in words] == [getattr(start, name) for name in words]
        if axis in WORDS:
            assert (answer.dp, answer.tp, answer.pp) == (start.dp, start.tp, start.pp)
    plan.build(TINY, layout)
    assert (layout.world_size, layout.global_batch_size) == (choices.num_ranks, choices.global_batch_size)


def moved(choices: Choices, text: str, axis: str, value: Any) -> Layout | Refusal:
    """What becomes of a layout when a hand moves one control."""
    return choices.follow(replace(Layout.parse(text), **{axis: value}), axis)


def test_every_choice_of_a_layout_has_a_control() -> None:
    assert "own" not in WORDS["schedule"]
    left_out = {field.name for field in fields(Layout)} - set(AXES)
    assert left_out == {"microbatch_size", "reshard_after_forward", "hybrid"}


def test_every_degree_can_be_reached_in_one_move() -> None:
    choices = Choices.of(4, TINY)
    for axis in ("dp", "tp", "pp", "num_microbatches"):
        for value in choices.values(axis):
            layout = moved(choices, "dp2 pp2 m4 b2 zero1 bf16", axis, value)
            assert isinstance(layout, Layout)
            assert (layout.global_batch_size, layout.zero_stage, layout.precision) == (16, 1, "bf16")
    assert str(moved(choices, "dp2 pp2 m4 b2", "pp", 4)) == "pp4 1f1b m4 b4"
    assert str(moved(choices, "dp2 pp2 m4 b2", "dp", 4)) == "dp4 m4"


def test_schedules_bring_their_stages_and_need_a_pipeline() -> None:
    choices = Choices.of(4, TINY)
    assert str(moved(choices, "dp2 pp2 m4 b2", "schedule", "zbv")) == "dp2 pp2 zbv v2 m4 b2"
    assert str(moved(choices, "dp2 pp2 zbv v2 m4 b2", "schedule", "1f1b")) == "dp2 pp2 1f1b m4 b2"
    refusal = moved(choices, "dp4 m4", "schedule", "zbv")
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith("pp=1 with schedule='zbv': it interleaves a pipeline")
    assert str(refusal.nearest) == "dp2 pp2 zbv v2 m4 b2"
    refusal = moved(choices, "dp2 pp2 zbv v2 m4 b2", "pp", 1)
    assert isinstance(refusal, Refusal)
    assert str(refusal.nearest) == "dp4 m4"
    refusal = moved(choices, "dp2 pp2 zbv v2 m4 b2", "num_virtual_stages", 1)
    assert isinstance(refusal, Refusal)
    assert "a V has two stages per rank" in refusal.reason
    assert str(refusal.nearest) == "dp2 pp2 1f1b m4 b2"
    three_layers = replace(TINY, num_layers=3)
    assert Choices.of(4, three_layers).values("num_virtual_stages") == [1]


def test_sequence_parallel_needs_tensor_parallel() -> None:
    refusal = moved(Choices.of(4, TINY), "dp4 m4", "sequence_parallel", True)
    assert isinstance(refusal, Refusal)
    assert str(refusal.nearest) == "dp2 tp2 m4 b2 sp"


def test_ranks_that_no_layout_can_use_stay_out() -> None:
    two_layers = Model(num_layers=2, d_model=64, num_heads=2, vocab_size=256, seq_len=32)
    assert Choices.of(7, two_layers, global_batch_size=4).num_ranks == 4
    with pytest.raises(PlanError, match="num_ranks=0 is below 1"):
        Choices.of(0, two_layers)


def test_a_number_in_the_place_of_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"ranks is of type int: a cockpit runs on what lk\.cluster\.start\(4\) gave"):
        widgets.cockpit(4)  # type: ignore[arg-type]
