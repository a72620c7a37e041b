"""What one stage adds to a rank's memory, as numbers: computed once for all stages that are alike."""

from collections.abc import Mapping
from typing import NamedTuple

from labkit.plan import Plan
from labkit.predict.activations import (
    head_bytes,
    layer_bytes,
    loss_bytes,
    recomputed_bytes,
    split_backward_bytes,
    stage_bytes,
    temporary_bytes,
)
from labkit.predict.buffers import gathered_bytes, received_bytes, reduced_bytes, summed_bytes
from labkit.predict.sizes import end_elements, head_elements, layer_elements, stage_holding

__all__ = ["Costs", "costs_of"]

FP32 = 4


class InLayer(NamedTuple):
    """Bytes when the backward of one of a stage's layers is under way.

    Attributes:
        freed: what the micro-batch has let go before.
        grown: by how much gradients have grown, where they are new.
        fresh: temporary: the gradient of the layer's largest matrix, where it does not add to one that is there.
        gathered: weights that are whole.
        packed: gradients on their way to their sum.
    """

    freed: int
    grown: int
    fresh: int
    gathered: int
    packed: int


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
        in_layers: the layers at which a backward can hold most: its first, its second, its last.
        bucket: gradients on their way from a backward's beginning on.
        reduced: the same at its end.
        gathered: weights that are whole at its end.
        replicated: weights of which there is a second copy.
        unpacked: what a forward's last all-gather came in, which is there until its end where weights stay whole.
        pending: what a reduce-scatter sent last, which torch lets go in the next backward.
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
    in_layers: tuple[InLayer, ...]
    bucket: int
    reduced: int
    gathered: int
    replicated: int
    unpacked: int
    pending: int
    summed: int

    @property
    def most_gathered(self) -> int:
        """Weights that are whole at any moment."""
        return max(self.gathered, self.replicated, self.unpacked, *(one.gathered for one in self.in_layers))


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
    kinds, is_last = stage_bytes(plan, stage), stage == plan.num_stages - 1
    num_layers, recomputed = len(plan.layers(stage)), recomputed_bytes(model, layout)
    reduced = reduced_bytes(plan, stage)
    gradients = FP32 * holding.gradients
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
        logits=loss_bytes(model, layout) if is_last else 0,
        layers=temporary_bytes(model, layout) + recomputed,
        weights=_weights_half_bytes(plan, num_layers, recomputed),
        end=FP32 * model.vocab_size * model.d_model // layout.tp if stage == 0 else 0,
        in_layers=tuple(
            _in_layer(plan, stage, index, gradients, kinds.get("stage outputs", 0))
            for index in sorted({0, min(1, num_layers - 1), num_layers - 1})
        ),
        bucket=0 if is_torch else reduced,  # DeepSpeed has it from the beginning
        reduced=reduced,
        gathered=gathered_bytes(plan, stage, 1),
        replicated=gathered_bytes(plan, stage, 0),
        unpacked=FP32 * layer_elements(plan) if keeps_whole else 0,
        pending=FP32 * end_elements(plan, stage) if is_sharded and is_torch else 0,
        summed=summed_bytes(plan, stage),
    )


def _in_layer(plan: Plan, stage: int, index: int, gradients: int, output: int) -> InLayer:
    """The `index`-th layer of a stage's backward.

    Args:
        plan: the plan.
        stage: the stage.
        index: 0 for the layer whose backward comes first.
        gradients: that stay, of the whole stage.
        output: what a micro-batch keeps of the stage's output.
    """
    model, layout = plan.model, plan.layout
    num_layers, is_last = len(plan.layers(stage)), stage == plan.num_stages - 1
    freed = index * sum(layer_bytes(model, layout).values())
    freed += sum(head_bytes(model, layout).values()) + output if is_last else 0
    layer, head = FP32 * layer_elements(plan), FP32 * head_elements(plan, stage)
    down = FP32 * model.d_ff * model.d_model // layout.tp
    gathered = gathered_bytes(plan, stage, 1 if 0 < index == num_layers - 1 else 2)
    bucket = reduced_bytes(plan, stage) if plan.engine == "deepspeed" else 0
    if layout.zero_stage <= 1 or layout.dp == layout.hybrid:
        return InLayer(freed, head + index * layer, down, gathered, bucket)
    packed = bucket if bucket or index == 0 else layer
    return InLayer(freed, gradients * index // num_layers, down + (0 if index else head), gathered, packed)


def _weights_half_bytes(plan: Plan, num_layers: int, recomputed: int) -> int:
    """With full recomputation torch computes a layer again for each of its weights, as far as that one needs."""
    if plan.layout.recompute != "full":
        return 0
    num_groups = 9 if plan.model.activation == "swiglu" else 8
    return num_layers * recomputed * (num_groups + 1) // 2
