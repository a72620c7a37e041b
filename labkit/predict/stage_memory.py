"""What one stage adds to a rank's memory, as numbers: computed once for all stages that are alike."""

from collections.abc import Mapping
from typing import NamedTuple

from labkit.plan import Plan
from labkit.predict.activations import (
    head_bytes,
    layer_bytes,
    logit_bytes,
    recomputed_bytes,
    split_backward_bytes,
    stage_bytes,
    temporary_bytes,
)
from labkit.predict.buffers import gathered_bytes, received_bytes, reduced_bytes, summed_bytes
from labkit.predict.sizes import head_elements, layer_elements, stage_holding

__all__ = ["Costs", "costs_of"]

FP32 = 4


class Costs(NamedTuple):
    """Bytes of one stage on one rank.

    Attributes:
        is_first: whether its backward finds no input's gradient.
        adds_up: whether a new gradient adds to one that is there in place, and does not go to shards first.
        parameters: weights that stay.
        gradients: that stay until the update.
        states: elements whose optimizer states the rank has.
        kinds: what a micro-batch keeps, by kind.
        kept: their sum.
        split: what it keeps besides between the two halves of a backward.
        received: the stage's receive buffers.
        logits: temporary at the loss.
        layers: temporary in a layer's backward.
        weights: temporary in the weights' half of a backward.
        end: temporary at a backward's end, where gradients are there already.
        fresh: the gradient of a layer's largest matrix, where it does not add to one that is there.
        freed: what a micro-batch has let go when its first and its last layer's backward begin.
        grown: by how much its gradients have grown then, where they are new.
        gathered: weights that are whole at the loss, in the first and in the last layer's backward.
        packed: gradients on their way to their sum: then, and at the end.
        summed: gradients that wait, packed, for the step's end.
    """

    is_first: bool
    adds_up: bool
    parameters: int
    gradients: int
    states: int
    kinds: Mapping[str, int]
    kept: int
    split: int
    received: int
    logits: int
    layers: int
    weights: int
    end: int
    fresh: tuple[int, int]
    freed: tuple[int, int]
    grown: tuple[int, int]
    gathered: tuple[int, int, int]
    packed: tuple[int, int, int, int]
    summed: int


def costs_of(plan: Plan, stage: int, dp_rank: int) -> Costs:
    """Count a stage's bytes.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("dp1"))
    >>> costs = costs_of(built, 0, 0)
    >>> costs.parameters == 4 * built.model.num_parameters, costs.kept == sum(costs.kinds.values())
    (True, True)
    """
    model, layout = plan.model, plan.layout
    holding = stage_holding(plan, stage, dp_rank)
    is_torch, is_sharded = plan.engine == "torch", layout.zero_stage > 1 and layout.dp > layout.hybrid
    keeps_whole = is_torch and is_sharded and not layout.reshards  # beside its shards
    kinds = stage_bytes(plan, stage)
    num_layers, is_last = len(plan.layers(stage)), stage == plan.num_stages - 1
    layer = FP32 * layer_elements(plan)
    head = FP32 * head_elements(plan, stage)
    down = FP32 * model.d_ff * model.d_model // layout.tp
    gradients, recomputed = FP32 * holding.gradients, recomputed_bytes(model, layout)
    freed = sum(head_bytes(model, layout).values()) + kinds.get("stage outputs", 0) if is_last else 0
    reduced = reduced_bytes(plan, stage)
    early = 0 if is_torch else reduced  # DeepSpeed has its bucket from the beginning
    return Costs(
        is_first=stage == 0,
        adds_up=not is_sharded,
        parameters=FP32 * (holding.parameters + (holding.optimizer if keeps_whole else 0)),
        gradients=gradients,
        states=holding.optimizer,
        kinds=kinds,
        kept=sum(kinds.values()),
        split=split_backward_bytes(plan, stage),
        received=received_bytes(plan, stage),
        logits=2 * logit_bytes(model, layout) if is_last else 0,
        layers=temporary_bytes(model, layout) + recomputed,
        weights=_weights_half_bytes(plan, num_layers, recomputed),
        end=FP32 * model.vocab_size * model.d_model // layout.tp if stage == 0 else 0,
        fresh=(down + head, down) if is_sharded else (down, down),
        freed=(freed, freed + (num_layers - 1) * sum(layer_bytes(model, layout).values())),
        grown=(0, gradients * (num_layers - 1) // num_layers)
        if is_sharded
        else (head, head + (num_layers - 1) * layer),
        gathered=tuple(gathered_bytes(plan, stage, num) for num in (0, 2, 1)),  # type: ignore[arg-type]
        packed=(early, early, layer if is_sharded and is_torch and num_layers > 1 else early, reduced),
        summed=summed_bytes(plan, stage),
    )


def _weights_half_bytes(plan: Plan, num_layers: int, recomputed: int) -> int:
    """With full recomputation torch computes a layer again for each of its weights, as far as that one needs."""
    if plan.layout.recompute != "full":
        return 0
    num_groups = 9 if plan.model.activation == "swiglu" else 8
    return num_layers * recomputed * (num_groups + 1) // 2
