"""A linear layer whose three matrix products are FP8, by torch or by Transformer Engine.

Shapes: M tokens, K features in, N features out; under tensor parallelism K or N is this rank's share.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from labkit.rank import fp8_casting
from labkit.rank.fp8_casting import Cast
from labkit.rank.fp8_library import Library
from labkit.rank.fp8_scaling import Casts, Scaling
from labkit.spec import Fp8


class Fp8Linear(nn.Linear):
    """`y = x W^T + b` with FP8 operands, accumulated in fp32; so are the products of the backward.

    Weight, bias and their gradients are fp32. Under autocast output and input gradient have its dtype, and the input is
    brought to it before the cast, as in Transformer Engine; else they have the input's.

    Attributes:
        casts: where scales come from. A layer by itself scales by `Fp8(recipe="current")`, until it gets another.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.casts = Scaling(Fp8(recipe="current"), ("linear",), torch.device("cpu")).of("linear")

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., N]."""
        device_type = x.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
        if not isinstance(self.weight, DTensor):
            return _product(x, self.weight, self.bias, self.casts, dtype, 1.0)
        return self._split(x, dtype)

    def _split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's share, where tensor parallelism split the weight by columns (N) or by rows (K)."""
        weight = self.weight
        if not isinstance(weight, DTensor) or not isinstance(x, DTensor):
            raise TypeError(f"a split weight takes a DTensor, not a {type(x).__name__}")
        by_columns = weight.placements[-1] == Shard(0)
        of_gradient: Placement = Partial() if by_columns else Shard(x.dim() - 1)
        local = x.to_local(grad_placements=(of_gradient,))
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else self.bias
        share = 1.0 if by_columns else 1.0 / weight.device_mesh.size()
        out = _product(local, weight.to_local(), bias, self.casts, dtype, share)
        placement: Placement = Shard(out.dim() - 1) if by_columns else Partial()
        return DTensor.from_local(out, x.device_mesh, (placement,), run_check=False)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, casts: Casts, dtype: torch.dtype, bias_share: float
) -> Tensor:
    if casts.scaling.library is not None:
        return _library_product(casts.scaling.library, x, weight, bias, casts, dtype, bias_share)
    result: Tensor = _Product.apply(x, weight, bias, casts, dtype, bias_share)  # type: ignore[no-untyped-call]
    return result


def _library_product(
    library: Library,
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    casts: Casts,
    dtype: torch.dtype,
    bias_share: float,
) -> Tensor:
    x_MK = x.reshape(-1, x.shape[-1]).to(dtype)
    tally = casts.scaling.tally
    if tally is not None and tally.is_on:
        y_MN = _watched(library, x_MK, weight_NK, casts)
    else:
        y_MN = library.product(casts.name, x_MK, weight_NK)
    if bias_N is not None:  # a share of the bias, whose gradient is whole
        y_MN = y_MN + (bias_N + (bias_share - 1) * bias_N.detach()).to(dtype)
    return y_MN.view(*x.shape[:-1], -1)


def _watched(library: Library, x_MK: Tensor, weight_NK: Tensor, casts: Casts) -> Tensor:
    """A product of a library that does not show its casts: what it multiplies is cast here once more, to be counted."""
    x_MK, weight_NK = x_MK.view_as(x_MK), weight_NK.view_as(weight_NK)  # their gradients are those of this product
    x, weight, gradients = x_MK.detach(), weight_NK.detach(), []
    y_MN = library.product(casts.name, x_MK, weight_NK)
    casts.along("input", x)
    casts.along("weight", weight)
    casts.compare("input", y_MN.detach(), x, weight.t())

    def of_output(gradient: Tensor) -> None:
        gradients.append(gradient)
        casts.along("gradient", gradient)

    if y_MN.requires_grad:
        y_MN.register_hook(of_output)
        weight_NK.register_hook(lambda found: casts.compare("gradient", found, gradients[0].t(), x))
    if x_MK.requires_grad:
        x_MK.register_hook(lambda found: casts.compare("weight", found, gradients[0], weight))
    return y_MN


class _Product(torch.autograd.Function):
    """One node for the three products, since they share what is cast.

    The input is kept in FP8. The weight is cast again in the backward: kept, it would outlive sharded weights, which
    are dropped after the forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        casts: Casts,
        dtype: torch.dtype,
        bias_share: float,
    ) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).to(dtype)
        x_cast, w_cast = casts.along("input", x_MK), casts.along("weight", weight_NK)
        y_MN = fp8_casting.product(x_cast, w_cast, dtype)
        casts.compare("input", y_MN, x_MK, weight_NK.t())
        if bias_N is not None:
            y_MN = y_MN + bias_N.to(dtype) * bias_share
        ctx.casts, ctx.dtype, ctx.x_dtype = casts, dtype, x.dtype
        kept = casts.across("input", x_MK) if casts.has_blocks else x_cast
        keeps_whole = casts.scaling.tally is not None and casts.scaling.tally.is_on
        ctx.save_for_backward(kept.values, kept.inverse, weight_NK, x_MK if keeps_whole else None)
        return y_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, inverse, weight_NK, x_MK = ctx.saved_tensors
        casts, g_MN = ctx.casts, gradient.reshape(-1, gradient.shape[-1])
        g_cast = casts.along("gradient", g_MN)
        x_gradient = w_gradient = b_gradient = None
        if _is_needed(ctx, 0):
            product = fp8_casting.product(g_cast, casts.across("weight", weight_NK), ctx.dtype)
            casts.compare("weight", product, g_MN, weight_NK)
            x_gradient = product.to(ctx.x_dtype).view(*gradient.shape[:-1], -1)
        if _is_needed(ctx, 1):
            kept = Cast(values, inverse)
            x_cast = kept if casts.has_blocks else kept.transposed()
            w_gradient = fp8_casting.product(casts.across("gradient", g_MN, g_cast), x_cast, torch.float32)
            if x_MK is not None:
                casts.compare("gradient", w_gradient, g_MN.t(), x_MK)
        if _is_needed(ctx, 2):
            b_gradient = g_MN.float().sum(dim=0)
        return x_gradient, w_gradient, b_gradient, None, None, None


def _is_needed(ctx: Any, index: int) -> bool:
    """Whether the backward under way asks for the gradient of an argument.

    A pipeline schedule may split a backward in two, one for the inputs and one for the weights. torch's own operations
    then compute one half each, but it tells a Python function only what may be needed at all.
    """
    if not ctx.needs_input_grad[index]:
        return False
    node = ctx.next_functions[index][0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is a leaf that the backward was asked for by name
        return True
