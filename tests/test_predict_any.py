"""Any plan has a memory and a step: finite, of parts that fit together, and the same with events as without."""

import math

import pytest
from hypothesis import assume, given, settings

from labkit import predict
from labkit.errors import PlanError
from labkit.predict import CATEGORIES
from labkit.spec import Hardware
from labkit.trace import Trace
from tests.test_plan_any import build, layouts, models

H100 = Hardware.preset("h100")


@settings(max_examples=200, deadline=None)
@given(models(), layouts())
def test_any_plan_has_a_memory_and_a_step(model, layout):
    try:
        plan = build(model, layout)
    except PlanError:
        assume(False)
    for optimizer in ("adamw", "sgd"):
        for rank, one in enumerate(predict.memory(plan, optimizer=optimizer)):
            assert one.rank == rank
            check_memory(plan, one)
    check_step(plan, predict.step(plan, H100))


def check_memory(plan, one):
    """The peak is no more than its parts' highest, and shards no more than the whole, twice where both are there."""
    sizes = {category: getattr(one, category) for category in CATEGORIES}
    assert all(size >= 0 for size in sizes.values())
    assert 0 < one.peak == sum(one.at_peak.values()) <= sum(sizes.values())
    assert all(one.at_peak[category] <= size for category, size in sizes.items())
    assert sum(one.activations_by_kind.values()) == one.activations
    assert one.host <= one.peak
    padding = 4 * 2 * plan.layout.dp * plan.model.num_layers * max(plan.model.d_model, plan.model.d_ff)
    whole = 4 * plan.model.num_parameters + padding
    assert one.gradients <= whole
    assert 0 <= one.parameters - 4 * plan.holding(one.rank).parameters <= whole


def check_step(plan, trace):
    assert 0 < trace.step_time_s < math.inf
    assert 0 <= trace.bubble_fraction < 1
    plain = Trace(trace.events, "predicted", plan)
    assert len(plain.events) == trace.num_events
    assert plain.step_time_s == pytest.approx(trace.step_time_s)
    assert plain.bubble_fraction == pytest.approx(trace.bubble_fraction, abs=1e-9)
