"""Every layout gives one rank's losses, gradient norms and weights: under AdamW, and under SGD with clipping active.

AdamW hides a wrong scale of the gradients; SGD with a learning rate of 0.1 and a small clip norm does not.
"""

import functools
import math
from dataclasses import replace

import pytest

from labkit.plan import build
from labkit.spec import Layout, Model, Training
from tests.ranks import bare

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]  # one world trains all layouts in the first test

NUM_STEPS, NUM_STEPS_SHORT = 10, 5
MODEL = Model(num_layers=4, d_model=32, num_heads=4, vocab_size=256, seq_len=32)
# 12 samples a step in every layout.
REFERENCE = "dp1 b12"
SHORT_REFERENCE = "dp1 m1 b12"  # the same, for the layouts that take fewer steps
LAYOUTS = (
    "dp4 b3",
    "tp4 b12",
    "pp4 1f1b m4 b3",
    "pp4 gpipe m4 b3",
    "dp2 tp2 m2 b3",
    "dp2 pp2 1f1b m3 b2",
    "dp2 pp2 gpipe m2 b3",
    "tp2 pp2 1f1b m4 b3",
    "dp3 m2 b2",
    "pp3 1f1b m6 b2",
    "dp1 m4 b3",
)
SHORT_LAYOUTS = (
    "dp1 b12 recompute:selective",
    "tp4 sp b12",
    "tp2 pp2 sp 1f1b m4 b3",
    "dp2 tp2 zero3 sp m2 b3",
    "tp2 pp2 m4 b3 recompute:full",
    "dp2 tp2 zero3 m2 b3 recompute:full",
    "dp4 zero1 b3 torch",
    "dp2 tp2 zero1 m2 b3",
    "dp4 zero2 m3 b1 torch",
    "dp2 pp2 zero2 gpipe m2 b3",
    "dp3 zero3 m2 b2 torch",
    "dp2 tp2 zero3 m2 b3",
    "dp2 pp2 zero3 1f1b m3 b2",
    "dp4 zero3 hybrid2 no_reshard b3",
    "pp2 interleaved v2 m4 b3",
    "pp2 interleaved_zero_bubble v2 m2 b6",
    "tp2 pp2 dualpipe_v v2 m4 b3",
    "dp2 pp2 looped_bfs v2 m3 b2",
    "dp2 pp2 zero1 zbv v2 m3 b2",
    "dp2 pp2 zero2 dualpipe_v v2 m6 b1",
    "dp2 pp2 zero3 zbv v2 m3 b2",
    "tp2 pp2 zbv v2 m2 b6 sp recompute:full",
)
RUNS = {
    "adamw": Training(num_steps=NUM_STEPS, optimizer="adamw", learning_rate=1e-3),
    "sgd": Training(num_steps=NUM_STEPS, optimizer="sgd", learning_rate=0.1, clip_norm=0.5, weight_decay=0.0),
}


def train_all(model, layouts):
    """Runs in each rank: every layout under every optimizer, with its weights at the end."""
    from labkit.rank import training

    results = {}
    for layout in layouts:
        plan = build(model, Layout.parse(layout))
        num_steps = NUM_STEPS_SHORT if layout in (SHORT_REFERENCE, *SHORT_LAYOUTS) else NUM_STEPS
        for optimizer, settings in RUNS.items():
            result = training.train(plan, replace(settings, num_steps=num_steps))
            if result is not None:
                result["weights"] = {name: w.numpy() for name, w in training.gather_weights().items()}
            results[layout, optimizer] = result
    return results


@functools.cache
def all_results():
    return bare.run(train_all, 4, MODEL, (REFERENCE, *LAYOUTS, SHORT_REFERENCE, *SHORT_LAYOUTS))


def relative(values, references):
    return max(abs(a - b) / abs(b) for a, b in zip(values, references, strict=True))


def differences(model, results, layout, optimizer, reference):
    one = results[0][reference, optimizer]
    found = {"losses": 0.0, "grad_norms": 0.0, "weights": 0.0}
    for rank in range(Layout.parse(layout).world_size):
        result = results[rank][layout, optimizer]
        assert result["weights"].keys() == one["weights"].keys()
        weights = max(abs(result["weights"][name] - one["weights"][name]).max() for name in one["weights"])
        found["losses"] = max(found["losses"], relative(result["losses"], one["losses"]))
        found["grad_norms"] = max(found["grad_norms"], relative(result["grad_norms"], one["grad_norms"]))
        found["weights"] = max(found["weights"], float(weights))
    return found


@pytest.mark.parametrize("optimizer", RUNS)
@pytest.mark.parametrize("layout", [*LAYOUTS, *SHORT_LAYOUTS])
def test_a_layout_trains_as_one_rank_does(layout, optimizer):
    reference = REFERENCE if layout in LAYOUTS else SHORT_REFERENCE
    found = differences(MODEL, all_results(), layout, optimizer, reference)
    assert found["losses"] <= 1e-5
    assert found["grad_norms"] <= 1e-4
    assert found["weights"] <= 0.1 * RUNS[optimizer].learning_rate


def test_the_comparison_means_something():
    one = all_results()[0][REFERENCE, "sgd"]
    assert all(norm > RUNS["sgd"].clip_norm for norm in one["grad_norms"]), "clipping was not active"
    assert one["losses"][0] == pytest.approx(math.log(256), rel=0.05)
    assert one["losses"][-1] < one["losses"][0] - 0.1
    assert all_results()[3]["dp3 m2 b2", "sgd"] is None
