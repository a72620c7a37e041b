"""What casts to FP8 did, as a value and as a picture."""

import math

import pytest

import labkit as lk
from labkit.errors import PlanError
from labkit.launch.record import MAX_FP8_STEPS, Record

MATRICES = ("attention.query", "feed_forward.down")
ROLES = ("input", "weight", "gradient")


def rows(step):
    """Two layers of two matrices, as ranks report them."""
    return [
        [f"layers.{layer}.{matrix}", role, 2.0**-step, 448.0 * 2**step, 0.01 * step, 0.0, None if step == 0 else 0.05]
        for layer in range(2)
        for matrix in MATRICES
        for role in ROLES
    ]


def record(num_steps=3, recipe="current"):
    return lk.trace.Fp8Record.read(lk.spec.Fp8(recipe=recipe), [(step, rows(step)) for step in range(num_steps)])


def test_a_record_has_every_step_layer_matrix_and_role():
    found = record()
    assert found.steps == (0, 1, 2)
    assert found.matrices == tuple(f"{layer} {matrix}" for layer in range(2) for matrix in MATRICES)
    assert len(found.casts) == 3 * 2 * 2 * 3
    (one,) = found.of(step=2, layer=1, matrix="attention.query", role="gradient")
    assert (one.amax, one.scale, one.underflow, one.saturation, one.error) == (0.25, 1792.0, 0.02, 0.0, 0.05)
    assert math.isnan(found.of(step=0)[0].error)


@pytest.mark.parametrize("quantity", ["underflow", "saturation", "error", "amax", "scale"])
def test_a_picture_has_a_map_for_each_role_and_a_cell_for_each_step(quantity):
    figure = lk.show.fp8(record(), quantity)
    assert [len(one.z) for one in figure.data] == [4, 4, 4]
    assert [list(one.x) for one in figure.data] == [[0, 1, 2]] * 3
    wanted = {"underflow": 2.0, "saturation": 0.0, "error": 5.0, "amax": -2.0, "scale": math.log2(1792)}[quantity]
    assert all(line[2] == pytest.approx(wanted) for one in figure.data for line in one.z)
    assert figure.data[0].zmax == figure.data[2].zmax
    heads = " ".join(one.text for one in figure.layout.annotations)
    assert ("gradient of the weight" in heads) == (quantity == "error")
    assert ("E5M2" in heads) == (quantity != "error")


def test_a_picture_says_where_the_largest_number_is():
    title = lk.show.fp8(record(recipe="block"), "underflow").layout.title.text
    assert "block scaling, E4M3" in title
    assert "largest: 2 %, input of attention.query in layer 0, step 2" in title


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(PlanError, match="a list holds nothing on FP8"):
        lk.show.fp8([])
    with pytest.raises(PlanError, match="nothing is recorded yet"):
        lk.show.fp8(record(0))
    with pytest.raises(PlanError, match="quantity='overflow' is unknown"):
        lk.show.fp8(record(), "overflow")


def test_a_long_run_keeps_the_newest_steps_and_a_run_that_goes_on_counts_from_0():
    kept = Record([0], first_step=None)
    for step in range(MAX_FP8_STEPS + 5):
        kept.on_fp8(0, {"step": 7 + step, "rows": rows(1)})
    assert [step for step, _ in kept.fp8()] == list(range(5, MAX_FP8_STEPS + 5))
    assert kept.wait_for_fp8(MAX_FP8_STEPS + 5, 0.0)
    assert not kept.wait_for_fp8(MAX_FP8_STEPS + 6, 0.0)
