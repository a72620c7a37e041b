"""What a rank keeps of its stages' parameters, gradients and optimizer states, under every ZeRO stage."""

from collections.abc import Iterable
from typing import NamedTuple

from labkit.plan.parameters import Parameter
from labkit.spec import Layout

__all__ = ["Holding", "flat_size", "held", "on_rank", "part_of"]


class Holding(NamedTuple):
    """How many elements a rank keeps.

    Attributes:
        parameters: weights kept through the step: a shard where they are gathered again for every layer.
        gradients: kept until the optimizer's step.
        optimizer: weights that this rank updates, so that it has their optimizer states.
    """

    parameters: int
    gradients: int
    optimizer: int


def held(layout: Layout, engine: str, parameters: Iterable[Parameter], dp_rank: int) -> Holding:
    """Count what a rank keeps of its stages' parameters.

    ZeRO-1 shards optimizer states, ZeRO-2 gradients too, ZeRO-3 parameters too (Rajbhandari et al. 2020, arXiv
    1910.02054). torch cuts each tensor by its first dimension, or for ZeRO-1 by its elements, and earlier ranks have
    the larger parts; DeepSpeed cuts the tensors together (`flat_size`), or for ZeRO-3 each of them, into equal parts
    and fills up the last.
    """
    shapes = [on_rank(one, layout.tp) for one in parameters]
    whole = sum(rows * columns for rows, columns in shapes)
    num_shards = layout.dp // layout.hybrid
    if layout.zero_stage == 0 or num_shards == 1:
        return Holding(whole, whole, whole)
    if engine == "deepspeed":
        each = sum(-(-rows * columns // num_shards) for rows, columns in shapes)
        part = each if layout.zero_stage == 3 else flat_size(whole, num_shards)
    elif layout.zero_stage == 1:
        part = sum(_share(rows * columns, num_shards, dp_rank) for rows, columns in shapes)
    else:
        index = dp_rank % num_shards
        part = sum(_share(rows, num_shards, index) * columns for rows, columns in shapes)
    kept = part if layout.zero_stage >= 2 and layout.reshards else whole
    return Holding(kept, part if layout.zero_stage >= 2 else whole, part)


def on_rank(parameter: Parameter, tp: int) -> tuple[int, int]:
    """Rows and columns that one of `tp` ranks has of a parameter, before ZeRO.

    >>> on_rank(Parameter("embedding.weight", 256, 128, "rows"), 2)
    (128, 128)
    """
    _, rows, columns, split = parameter
    return rows // tp if split == "rows" else rows, columns // tp if split == "columns" else columns


def part_of(size: int, num_parts: int, index: int) -> tuple[int, int]:
    """Where a part begins and ends: equal parts, the last ones shorter or empty.

    >>> [part_of(5, 4, index) for index in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-size // num_parts)
    return min(index * each, size), min((index + 1) * each, size)


def flat_size(size: int, num_parts: int) -> int:
    """The part of each rank where DeepSpeed 0.19.8 puts tensors one behind the other: an even number of elements.

    >>> flat_size(25, 4)
    8
    """
    return 2 * -(-size // (2 * num_parts))


def _share(size: int, num_parts: int, index: int) -> int:
    first, last = part_of(size, num_parts, index)
    return last - first
