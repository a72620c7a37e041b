"""Which sizes FP8 products can have."""

import math

from labkit.errors import PlanError
from labkit.spec import Layout, Model

__all__ = ["check_sizes"]

STEP = 16
"""Every dimension of an FP8 product is a multiple of this: GPUs' kernels refuse others, so plans do, too."""


def check_sizes(model: Model, layout: Layout) -> None:
    """Raise PlanError unless the matrices of attention and feed-forward, and a micro-batch's tokens, fit FP8 products.

    >>> model = Model(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, vocab_size=64, seq_len=24)
    >>> check_sizes(model, Layout.parse("b2 fp8"))
    >>> check_sizes(model, Layout.parse("fp8"))
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: microbatch_size(1) * seq_len(24) = 24 tokens is no multiple of 16: FP8 products take \
sixteens. Use b2 or bf16.
    """
    tp, step = layout.tp, STEP * layout.tp
    if model.d_model % step:
        near = _above(model.d_model, math.lcm(step, model.num_heads))
        raise _refusal("d_model", model.d_model, tp, f"d_model={near}")
    kv_width = model.num_kv_heads * model.head_dim
    if kv_width % step:
        fact = f"num_kv_heads({model.num_kv_heads}) * head size({model.head_dim}) ="
        raise _refusal(fact, kv_width, tp, f"num_kv_heads={model.num_heads}")
    if model.d_ff % step:
        raise _refusal("d_ff", model.d_ff, tp, f"d_ff={_above(model.d_ff, step)}")
    size, tokens = layout.microbatch_size, layout.microbatch_size * model.seq_len
    if tokens % STEP:
        fits = _above(size, STEP // math.gcd(STEP, model.seq_len))
        raise PlanError(
            f"microbatch_size({size}) * seq_len({model.seq_len}) = {tokens} tokens is no multiple of {STEP}: "
            f"FP8 products take sixteens. Use b{fits} or bf16."
        )


def _refusal(name: str, size: int, tp: int, fix: str) -> PlanError:
    fact = f"{name}{'' if name.endswith('=') else '='}{' ' if name.endswith('=') else ''}{size}"
    where = f", divided by tp={tp}, is {size / tp:g}," if tp > 1 else " is"
    return PlanError(f"{fact}{where} no multiple of {STEP}: FP8 products take sixteens. Use {fix} or bf16.")


def _above(size: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step
