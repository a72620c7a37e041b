"""FP8 training on GPUs, with torch's own FP8 products."""

import pytest

import labkit as lk

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

MODEL = lk.spec.Model(num_layers=2, d_model=128, num_heads=4, vocab_size=256, seq_len=64)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_trains_as_bf16_does(recipe: str) -> None:
    with lk.cluster.start(1) as ranks:
        curves = []
        for text, fp8 in (("b4 bf16", None), ("b4 fp8", lk.spec.Fp8(recipe=recipe))):
            plan = lk.plan.build(MODEL, lk.spec.Layout.parse(text))
            curves.append(lk.launch.train(ranks, plan, num_steps=20, fp8=fp8, progress=False).losses)
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
