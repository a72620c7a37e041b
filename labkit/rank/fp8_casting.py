"""Casts to FP8 and products of what was cast, in Transformer Engine's formulas.

Shapes: M rows, K columns (what a product sums over), N rows of the other matrix.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.spec.fp8 import LARGEST

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

BLOCK = 128
"""Entries that share a scale in block scaling."""

# What is above rounds to more than the largest number: half a step of the last binade (32 and 8192).
SATURATES_ABOVE = {"e4m3": 464.0, "e5m2": 61440.0}

_LARGEST_SCALE = torch.finfo(torch.float32).max


def delayed_scale(amax: Tensor, largest: Tensor | float, *, margin: int = 0, previous: Tensor | float = 1.0) -> Tensor:
    """The factor that brings magnitudes up to `amax` into a format: `largest / amax / 2^margin`.

    Where amax is 0 or not finite there is none, and `previous` stays; where it is so small that the factor has no
    finite fp32 value, it is fp32's largest.
    """
    scale = _divided(largest, amax) / 2**margin
    usable = torch.isfinite(amax) & (amax > 0)
    return torch.where(usable, scale, previous).clamp(max=_LARGEST_SCALE)


def current_scale(amax: Tensor, largest: float) -> Tensor:
    """The factor that brings magnitudes up to `amax` into a format: `largest / amax`.

    It is 1 where amax is 0. Where amax is infinite it is 0, so that products are no numbers and nobody misses it.
    """
    return torch.where(amax == 0, 1.0, _divided(largest, amax)).clamp(max=_LARGEST_SCALE)


def _divided(largest: Tensor | float, amax: Tensor) -> Tensor:
    """A quotient rounded once: a number divided by a tensor is rounded twice in torch, as reciprocal and product."""
    return torch.div(torch.as_tensor(largest, dtype=torch.float32, device=amax.device), amax)


def power_of_two(scale: Tensor) -> Tensor:
    """The largest power of two that is at most `scale`: multiplying by it rounds nothing."""
    floor = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    return torch.where(torch.isfinite(scale) & (scale > 0), floor, scale)


def chosen_amax(history: Tensor, choice: str) -> Tensor:
    """The amax that delayed scaling goes by.

    Args:
        history: amaxes [step, tensor]; row 0 is the present step, the last row the step before.
        choice: "max" of all rows, or the "most_recent", row 0.
    """
    return history.amax(dim=0) if choice == "max" else history[0].clone()


def rolled(history: Tensor) -> Tensor:
    """The history for the next step: row 0 moves to the end, the oldest (row 1) goes, and row 0 is 0."""
    following = history.roll(-1, dims=0)
    following[0] = 0.0
    return following


@dataclass(slots=True)
class Cast:
    """A matrix in FP8.

    Attributes:
        values: fp8 [M, K].
        inverse: what its entries are multiplied by to have their size back: a scalar; or one for each row and block
            of 128 columns, [M, blocks].
    """

    values: Tensor
    inverse: Tensor

    def transposed(self) -> "Cast":
        """The transpose, where one scale is for all."""
        return Cast(self.values.t().contiguous(), self.inverse)

    def dequantised(self) -> Tensor:
        """The numbers that the FP8 values stand for, fp32 [M, K]."""
        return self.values.float() * entrywise(self)


def entrywise(cast: Cast) -> Tensor:
    """A cast's inverse scales in a form that goes with its values, entry by entry."""
    return _spread(cast.inverse, cast.values.shape[1]) if cast.inverse.dim() else cast.inverse


def round_to(scaled: Tensor, name: str) -> Tensor:
    """Cut off at the format's largest number and round to it, halves to even; what is no number stays none."""
    largest = LARGEST[name]
    return scaled.clamp(-largest, largest).to(DTYPES[name])


def cast(x_MK: Tensor, name: str, scale: Tensor) -> Cast:
    """Cast with one scale."""
    return Cast(round_to(x_MK.float() * scale, name), scale.reciprocal())


def cast_rows(x_MK: Tensor, name: str) -> Cast:
    """Cast with a power of two for every 1 x 128 entries."""
    amax = _blocks(x_MK.abs().float()).amax(dim=-1)
    scale = power_of_two(current_scale(amax, LARGEST[name]))
    values = round_to(x_MK.float() * _spread(scale, x_MK.shape[1]), name)
    return Cast(values, scale.reciprocal())


def cast_squares(x_MK: Tensor, name: str) -> tuple[Cast, Cast]:
    """Cast with a power of two for every 128 x 128 entries. Returns the cast, and the transpose's."""
    rows, columns = x_MK.shape
    by_row = _blocks(x_MK.abs().float()).amax(dim=-1)
    amax = _blocks(by_row.t()).amax(dim=-1).t()
    scale = power_of_two(current_scale(amax, LARGEST[name]))
    of_row, of_column = _spread(scale.t(), rows).t(), _spread(scale, columns)
    values = round_to(x_MK.float() * _spread(of_row, columns), name)
    whole = Cast(values, of_row.reciprocal())
    return whole, Cast(values.t().contiguous(), of_column.t().contiguous().reciprocal())


def product(left_MK: Cast, right_NK: Cast, dtype: torch.dtype) -> Tensor:
    """`left @ right^T` of FP8 values, accumulated in fp32. Returns [M, N] in `dtype`.

    With scales for blocks, one product for each block of columns, scaled, and added up in fp32: the CPU's kernel takes
    a scale for each row, but none for each block. On a GPU, whose kernel is another, the numbers that
    the FP8 values stand for are multiplied in fp32.
    """
    a, b = left_MK.values, right_NK.values
    if not left_MK.inverse.dim():
        return torch._scaled_mm(
            a, b.t(), scale_a=left_MK.inverse, scale_b=right_NK.inverse, out_dtype=dtype, use_fast_accum=False
        )
    if a.is_cuda:
        return (left_MK.dequantised() @ right_NK.dequantised().t()).to(dtype)
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for block in range(left_MK.inverse.shape[1]):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        total += torch._scaled_mm(
            a[:, part].contiguous(),
            b[:, part].contiguous().t(),
            scale_a=left_MK.inverse[:, block : block + 1].contiguous(),
            scale_b=right_NK.inverse[:, block : block + 1].contiguous().t(),
            out_dtype=torch.float32,
        )
    return total.to(dtype)


def _blocks(x_MK: Tensor) -> Tensor:
    """Entries by blocks of columns, the last one filled up with 0: [M, blocks, 128]."""
    rows, columns = x_MK.shape
    filled = torch.nn.functional.pad(x_MK, (0, -columns % BLOCK))
    return filled.view(rows, -1, BLOCK)


def _spread(of_block: Tensor, columns: int) -> Tensor:
    """A number for each column from one for each block of columns: [M, blocks] to [M, K]."""
    return of_block.repeat_interleave(BLOCK, dim=1)[:, :columns]
