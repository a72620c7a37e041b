"""FP8 recipes, and the sizes that FP8 products take."""

import json
import pathlib

import pytest

import labkit as lk
from labkit.errors import PlanError
from labkit.formats import FORMATS
from labkit.spec.fp8 import LARGEST

MODEL = lk.spec.Model(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, vocab_size=64, seq_len=24)
GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "transformer_engine.json").read_text())


def test_the_defaults_are_those_of_transformer_engine():
    delayed, current, block = (lk.spec.Fp8(recipe=name) for name in ("delayed", "current", "block"))
    theirs = GOLDEN["defaults"]
    assert lk.spec.Fp8() == delayed
    assert (delayed.margin, delayed.history, delayed.amax) == tuple(
        theirs["DelayedScaling"][name] for name in ("margin", "amax_history_len", "amax_compute_algo")
    )
    for own, name in ((delayed, "DelayedScaling"), (current, "Float8CurrentScaling"), (block, "Float8BlockScaling")):
        assert [own.largest("input"), own.largest("gradient")] == theirs[name]["largest"]
        assert own.largest("weight") == own.largest("input")
    assert theirs["Float8CurrentScaling"]["powers_of_two"] == [False] * 3
    assert theirs["Float8BlockScaling"]["powers_of_two"] == [True] * 3


def test_a_format_can_be_chosen_for_any_recipe():
    assert lk.spec.Fp8(format="e4m3").format_of("gradient") == "e4m3"
    assert lk.spec.Fp8(recipe="block", format="hybrid").format_of("gradient") == "e5m2"
    assert {name: FORMATS[name].largest for name in LARGEST} == dict(LARGEST)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recipe": "delay"},
            "Fp8.recipe='delay' is unknown: Fp8.recipe is 'delayed', 'current' or 'block'. Did you mean 'delayed'?",
        ),
        (
            {"format": "e5m2"},
            "Fp8.format='e5m2' is unknown: Fp8.format is 'hybrid' or 'e4m3'. Use Fp8.format='hybrid'.",
        ),
        ({"history": 0}, "Fp8.history=0 is below 1: Fp8.history starts there. Use Fp8.history=1."),
        (
            {"recipe": "current", "history": 4},
            "Fp8.history=4 with recipe='current': only delayed scaling looks back. "
            "Use recipe='delayed' or drop history.",
        ),
        (
            {"recipe": "block", "margin": 1},
            "Fp8.margin=1 with recipe='block': only delayed scaling looks back. Use recipe='delayed' or drop margin.",
        ),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(options, message):
    with pytest.raises(PlanError) as caught:
        lk.spec.Fp8(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sizes", "layout", "message"),
    [
        (
            {},
            "fp8",
            "microbatch_size(1) * seq_len(24) = 24 tokens is no multiple of 16: FP8 products take sixteens. "
            "Use b2 or bf16.",
        ),
        (
            {"d_model": 72, "num_heads": 6},
            "fp8 b2",
            "d_model=72 is no multiple of 16: FP8 products take sixteens. Use d_model=96 or bf16.",
        ),
        (
            {"d_model": 96, "num_heads": 8},
            "tp4 fp8 b2",
            "d_model=96, divided by tp=4, is 24, no multiple of 16: FP8 products take sixteens. "
            "Use d_model=128 or bf16.",
        ),
        (
            {"num_heads": 8, "num_kv_heads": 1},
            "fp8 b2",
            "num_kv_heads(1) * head size(8) = 8 is no multiple of 16: FP8 products take sixteens. "
            "Use num_kv_heads=8 or bf16.",
        ),
        (
            {"d_ff": 96},
            "fp8 b2 tp4",
            "d_ff=96, divided by tp=4, is 24, no multiple of 16: FP8 products take sixteens. Use d_ff=128 or bf16.",
        ),
    ],
)
def test_sizes_that_fp8_products_cannot_have_are_refused(sizes, layout, message):
    fields = {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 64, "seq_len": 24}
    model = lk.spec.Model(**(fields | sizes))
    with pytest.raises(PlanError) as caught:
        lk.plan.build(model, lk.spec.Layout.parse(layout))
    assert str(caught.value) == message
    lk.plan.build(model, lk.spec.Layout.parse(layout.replace("fp8", "bf16")))


def test_an_fp8_layout_is_a_plan():
    assert str(lk.plan.build(MODEL, lk.spec.Layout.parse("dp2 tp2 b2 fp8")).layout) == "dp2 tp2 b2 fp8"


def test_a_recipe_with_another_precision_is_refused():
    for options, what in (({"fp8": lk.spec.Fp8(recipe="current")}, "fp8=Fp8("), ({"record_fp8": True}, "record_fp8=")):
        training = lk.spec.Training(num_steps=1, **options)
        training.check_precision("fp8")
        with pytest.raises(PlanError, match="with precision='bf16': nothing is cast to FP8 there") as caught:
            training.check_precision("bf16")
        assert str(caught.value).startswith(what)
    with pytest.raises(PlanError, match="fp8='block' is no Fp8"):
        lk.spec.Training(num_steps=1, fp8="block")
