"""What a rank keeps of its stages' parameters, gradients and optimizer states, under every ZeRO stage."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from labkit.spec import Layout, Model

__all__ = ["Holding", "held", "stage_shapes"]

Shape = tuple[int, ...]


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


def held(layout: Layout, engine: str, shapes: Iterable[Shape], dp_rank: int) -> Holding:
    """Count what a rank keeps of tensors of these shapes.

    ZeRO-1 shards optimizer states, ZeRO-2 gradients too, ZeRO-3 parameters too (Rajbhandari et al. 2020, arXiv
    1910.02054). torch cuts each tensor by its first dimension, or for ZeRO-1 by its elements, and earlier ranks have
    the larger parts; DeepSpeed cuts the tensors together, or for ZeRO-3 each of them, into equal parts and fills up
    the last.
    """
    listed = list(shapes)
    whole = sum(math.prod(shape) for shape in listed)
    num_shards = layout.dp // layout.hybrid
    if layout.zero_stage == 0 or num_shards == 1:
        return Holding(whole, whole, whole)
    if engine == "deepspeed":
        each = sum(-(-math.prod(shape) // num_shards) for shape in listed)
        part = each if layout.zero_stage == 3 else -(-whole // num_shards)
    elif layout.zero_stage == 1:
        part = sum(_share(math.prod(shape), num_shards, dp_rank) for shape in listed)
    else:
        index = dp_rank % num_shards
        part = sum(_share(shape[0], num_shards, index) * math.prod(shape[1:]) for shape in listed)
    parameters = part if layout.zero_stage >= 2 and layout.reshards else whole
    return Holding(parameters, part if layout.zero_stage >= 2 else whole, part)


def _share(size: int, num_parts: int, index: int) -> int:
    """The size of a part, when all but the last are as large as can be."""
    each = -(-size // num_parts)
    return max(0, min(each, size - index * each))


def stage_shapes(model: Model, layers: range, tp: int) -> Iterator[Shape]:
    """The shape of every parameter of a stage on one of `tp` ranks; matrices are [d_out, d_in].

    >>> model = Model.preset("tiny")
    >>> sum(math.prod(shape) for shape in stage_shapes(model, range(4), 1)) == model.num_parameters
    True
    """
    is_first, is_last = layers.start == 0, layers.stop == model.num_layers
    table = (model.vocab_size // tp, model.d_model)
    if is_first:
        yield table
        if model.position == "learned":
            yield (model.seq_len, model.d_model)
    for _ in layers:
        yield from _layer_shapes(model, tp)
    if is_last:
        yield from _norm_shapes(model)
        if not (model.tied_embeddings and is_first):
            yield table


def _layer_shapes(model: Model, tp: int) -> Iterator[Shape]:
    width, kv_width, inner = model.d_model, model.num_kv_heads * model.head_dim, model.d_ff
    columns = [width // tp, kv_width // tp, kv_width // tp, *[inner // tp] * (2 if model.activation == "swiglu" else 1)]
    for rows in columns:
        yield (rows, width)
        if model.bias:
            yield (rows,)
    for columns_in in (width // tp, inner // tp):
        yield (width, columns_in)
        if model.bias:
            yield (width,)
    yield from _norm_shapes(model)
    yield from _norm_shapes(model)


def _norm_shapes(model: Model) -> Iterator[Shape]:
    yield (model.d_model,)
    if model.norm == "layer" and model.bias:
        yield (model.d_model,)
