"""The bytes that training keeps on a rank from step to step: weights, gradients and optimizer states."""

from labkit.plan import Plan
from labkit.spec.checks import choice

__all__ = ["state_bytes"]

FP32_BYTES = 4
NUM_MOMENTS = {"adamw": 2, "sgd": 0}


def state_bytes(plan: Plan, rank: int, optimizer: str = "adamw") -> int:
    """Return the bytes of weights, gradients and optimizer states that a rank holds at the end of its last backward.

    All are fp32, in bf16 too: weights are the master weights. Where sharded weights stay gathered for the backward
    (ZeRO-2), a rank holds them beside its shard; DeepSpeed keeps what a rank updates beside the weights, and in bf16
    computes with weights and gradients of two bytes. What is offloaded counts too: on the CPU it is the same memory.
    Activations and buffers are not counted.

    Args:
        plan: the plan.
        rank: one of its ranks.
        optimizer: "adamw" (two moments) or "sgd" (none).

    Raises:
        PlanError: no such rank or optimizer.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> model = Model.preset("tiny")
    >>> of = lambda text: state_bytes(plan.build(model, Layout.parse(text)), 0) / model.num_parameters
    >>> of("dp4 torch"), of("dp4 zero1 torch"), of("dp4 zero2 torch"), of("dp4 zero3 torch")
    (16.0, 10.0, 8.0, 4.0)
    """
    choice("optimizer", optimizer, tuple(NUM_MOMENTS))
    holding, layout = plan.holding(rank), plan.layout
    in_step = FP32_BYTES
    copies = 0
    if layout.zero_stage and layout.dp > layout.hybrid:
        has_own_copy = plan.engine == "deepspeed" or (layout.zero_stage > 1 and not layout.reshards)
        copies = holding.optimizer if has_own_copy else 0
    if plan.engine == "deepspeed" and layout.precision != "fp32":
        in_step, copies = 2, holding.optimizer
    moments = NUM_MOMENTS[optimizer] * holding.optimizer
    return in_step * (holding.parameters + holding.gradients) + FP32_BYTES * (copies + moments)
