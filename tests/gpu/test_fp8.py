"""FP8 training on GPUs: by Transformer Engine's layers where it is installed, else by torch's own FP8 products."""

import importlib.util

import pytest

import labkit as lk
from labkit.cluster import devices

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

MODEL = lk.spec.Model(num_layers=2, d_model=128, num_heads=4, vocab_size=256, seq_len=64)
RECIPES = ("delayed", "current", "block")

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="no Transformer Engine here (EXTRAS=gpu make test)"
)
needs_two = pytest.mark.skipif(len(devices._gpus()) < 2, reason="fewer than two GPUs here")


def train(ranks: lk.cluster.Ranks, text: str, recipe: str | None = None, **options: object) -> lk.launch.Run:
    plan = lk.plan.build(MODEL, lk.spec.Layout.parse(text))
    fp8 = lk.spec.Fp8(recipe=recipe) if recipe is not None else None
    return lk.launch.train(ranks, plan, num_steps=20, fp8=fp8, progress=False, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_trains_as_bf16_does(recipe: str) -> None:
    with lk.cluster.start(1) as ranks:
        curves = [train(ranks, "b4 bf16"), train(ranks, "b4 fp8", recipe)]
    assert curves[1].losses == pytest.approx(curves[0].losses, rel=0.02)
    assert curves[0].fp8_library is None


@needs_library
@pytest.mark.parametrize("recipe", RECIPES)
def test_transformer_engine_multiplies_where_it_is_installed(recipe: str) -> None:
    with lk.cluster.start(1) as ranks:
        plain = train(ranks, "b4 bf16")
        for text in ("b4 fp8", "m2 b2 recompute:full fp8", "b4 zero3 fp8"):
            run = train(ranks, text, recipe, record_fp8=True)
            if recipe != "block":  # it takes CUDA 12.9
                assert run.fp8_library == "transformer_engine"
            assert run.losses == pytest.approx(plain.losses, rel=0.02), text
            last = run.fp8.of(step=19)
            assert all(cast.amax > 0 and 0 <= cast.saturation < 0.01 for cast in last)
            assert all(0.005 < cast.error < 0.3 for cast in last)


@needs_library
def test_a_live_state_goes_on_also_under_another_layout() -> None:
    with lk.cluster.start(1) as ranks:
        once = train(ranks, "b4 fp8", "delayed").losses
        plan = lk.plan.build(MODEL, lk.spec.Layout.parse("b4 fp8"))
        parts = []
        for start in ("fresh", "live"):
            run = lk.launch.train(ranks, plan, num_steps=10, start=start, progress=False)
            assert run.fp8_library == "transformer_engine"
            parts += run.losses
        assert parts == pytest.approx(once, rel=1e-3)
        plan = lk.plan.build(MODEL, lk.spec.Layout.parse("m2 b2 fp8"))
        lk.launch.switch(ranks, plan, progress=False)
        run = lk.launch.train(ranks, plan, num_steps=2, start="live", progress=False)
        assert run.fp8_library == "transformer_engine"
        assert run.losses[-1] < once[0]


@needs_two
@pytest.mark.parametrize("text", ["tp2 b4 fp8", "tp2 sp b4 fp8", "dp2 b2 fp8", "dp2 zero3 b2 torch fp8", "pp2 m4 fp8"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_gpus_train_as_one_does(text: str, recipe: str) -> None:
    with lk.cluster.start(2) as ranks:
        one = train(ranks, "m4 fp8" if "pp2" in text else "b4 fp8", recipe)
        two = train(ranks, text, recipe)
        assert two.losses == pytest.approx(one.losses, rel=0.02)
        assert two.fp8_library == one.fp8_library
