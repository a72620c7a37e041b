"""FP8 as a notebook sees it: a run with its record, and how far its losses are from those of bf16 and fp32."""

import pytest

import labkit as lk
from labkit.errors import PlanError

pytestmark = pytest.mark.ranks

MODEL = lk.spec.Model(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, vocab_size=256, seq_len=32)
NUM_STEPS = 200
# Of the mean loss of the last 20 steps, and of the last step's alone, relative.
BF16_BAND, FP8_BAND, LAST_BAND = 0.005, 0.01, 0.02


def train(ranks, text, **options):
    plan = lk.plan.build(MODEL, lk.spec.Layout.parse(text))
    return lk.launch.train(ranks, plan, progress=False, **options)


def test_a_run_has_its_record_and_a_picture(ranks):
    recipe = lk.spec.Fp8(recipe="current")
    run = train(ranks, "dp2 pp2 m2 fp8", num_steps=3, fp8=recipe, record_fp8=True, trace=False)
    assert run.fp8.recipe == recipe
    assert run.fp8_library == "torch: ranks compute on the CPU"
    assert run.fp8.steps == (0, 1, 2)
    assert len(run.fp8.of(step=1, role="weight")) == 2 * 7
    assert all(0 <= cast.underflow < 1 and cast.amax > 0 for cast in run.fp8.casts)
    assert len(lk.show.fp8(run).data) == 3
    more = train(ranks, "dp2 pp2 m2 fp8", num_steps=2, fp8=recipe, start="live", record_fp8=True)
    assert more.fp8.steps == (0, 1)


def test_fp8_is_asked_for_in_the_layout(ranks):
    with pytest.raises(PlanError, match="with precision='bf16': nothing is cast to FP8 there"):
        train(ranks, "dp4 bf16", num_steps=1, fp8=lk.spec.Fp8())
    run = train(ranks, "dp4 fp8", num_steps=1)
    with pytest.raises(PlanError, match="record_fp8=False in this run of 'dp4 fp8'"):
        _ = run.fp8


def test_numbers_that_leave_fp8s_range_are_an_error_and_ranks_go_on(ranks):
    with pytest.raises(lk.errors.LabError, match="numbers left the range of fp8"):
        train(ranks, "dp4 fp8", num_steps=20, optimizer="sgd", learning_rate=1e30, clip_norm=None)
    assert len(train(ranks, "dp4 fp8", num_steps=1).losses) == 1


def test_scales_go_along_to_another_layout(ranks):
    recipe = lk.spec.Fp8(history=4)
    options = {"fp8": recipe, "optimizer": "sgd", "learning_rate": 0.5, "trace": False}
    once = train(ranks, "dp4 fp8", num_steps=6, **options).losses
    parts = train(ranks, "dp4 fp8", num_steps=2, **options).losses
    for text in ("m4 fp8", "dp2 pp2 m2 fp8"):  # ranks 1 to 3 have no part in the first
        lk.launch.switch(ranks, lk.plan.build(MODEL, lk.spec.Layout.parse(text)), progress=False)
        parts += train(ranks, text, num_steps=2, start="live", **options).losses
    assert parts == pytest.approx(once, rel=1e-4)
    with pytest.raises(lk.errors.RankError, match=r"the live training state has Fp8\(.*history=4"):
        train(ranks, "dp2 pp2 m2 fp8", num_steps=1, start="live", **(options | {"fp8": None}))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_losses_over_200_steps_are_within_their_bands(ranks):
    def losses(precision, recipe=None):
        return train(ranks, f"dp4 {precision}", num_steps=NUM_STEPS, fp8=recipe, trace=False)

    curves = {name: losses(name) for name in ("fp32", "bf16")}
    for recipe in ("delayed", "current", "block"):
        curves[f"fp8, {recipe}"] = losses("fp8", lk.spec.Fp8(recipe=recipe))
    last = {name: sum(run.losses[-20:]) / 20 for name, run in curves.items()}
    assert last["fp32"] < 0.6 * curves["fp32"].losses[0]
    assert last["bf16"] == pytest.approx(last["fp32"], rel=BF16_BAND)
    for name, run in curves.items():
        assert len(run.losses) == NUM_STEPS
        assert last[name] == pytest.approx(last["bf16"], rel=FP8_BAND), name
        assert run.losses[-1] == pytest.approx(curves["bf16"].losses[-1], rel=LAST_BAND), name
    figure = lk.show.losses(curves)
    assert [curve.name for curve in figure.data] == list(curves)
