"""The bytes that training keeps on a rank from step to step: weights, gradients and optimizer states."""

from labkit.plan import Plan
from labkit.plan.moves import BYTES_EACH, STATES
from labkit.spec.checks import choice

__all__ = ["state_bytes"]


def state_bytes(plan: Plan, rank: int, optimizer: str = "adamw") -> int:
    """Return the bytes of weights, gradients and optimizer states that a rank holds at the end of its last backward.

    All are fp32, in bf16 too: weights are the master weights. Where torch keeps sharded weights gathered for the
    backward (ZeRO-2), a rank holds them beside its shard; DeepSpeed's ZeRO keeps a copy of what a rank updates. What is
    offloaded counts too: for CPU ranks it is the same memory. Activations and buffers do not.

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
    choice("optimizer", optimizer, tuple(STATES))
    holding, layout = plan.holding(rank), plan.layout
    keeps_gathered = layout.zero_stage > 1 and layout.dp > layout.hybrid and not layout.reshards
    has_own_copy = layout.zero_stage > 0 if plan.engine == "deepspeed" else keeps_gathered
    copies = len(STATES[optimizer]) + has_own_copy
    return BYTES_EACH * (holding.parameters + holding.gradients + copies * holding.optimizer)
