"""What a rank hands to collectives and sends to neighbours in one step, by axis of the mesh."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from labkit.errors import PlanError
from labkit.plan import AXES, Plan
from labkit.spec.checks import choice, number, shown, whole

__all__ = ["INNER_TO_OUTER", "Traffic", "groups_in_order", "num_hosts", "ring_time", "traffic"]

INNER_TO_OUTER = ("tp", "dp", "pp")
"""The order of the mesh in `Plan`: neighbouring ranks share a tensor-parallel group."""


class Traffic(NamedTuple):
    """One kind of call that a rank makes in a step.

    Attributes:
        axis: over which axis.
        kind: "all_reduce", or "send" to a neighbouring stage.
        num_calls: how often in a step.
        num_bytes: of the tensor, each time.
    """

    axis: str
    kind: str
    num_calls: int
    num_bytes: int


def traffic(plan: Plan, rank: int = 0) -> list[Traffic]:
    """Count what a rank communicates in a step: activations over tp and pp, gradients over dp.

    A layer adds up partial sums twice forward and twice backward over tp (Shoeybi et al. 2019, arXiv 1909.08053), the
    embedding once forward and the head once backward; the loss on shards of the vocabulary takes three numbers a token.
    A boundary between two stages carries activations forward and their gradients backward. All are fp32 but the sums of
    a layer's forward in 16 bits or 8, which have two bytes: the lab's residual stream is fp32 under every precision.
    The gradient of a matrix that both ends of a pipeline share, and a step's few numbers over all ranks, do not count.

    Raises:
        PlanError: no such rank, or a layout that sends otherwise: with ZeRO, sequence parallelism or full recompute.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> for one in traffic(plan.build(Model.preset("tiny"), Layout.parse("dp2 pp2 m4"))):
    ...     print(*one)
    dp all_reduce 1 1607680
    pp send 4 65536
    """
    layout, model = plan.layout, plan.model
    if layout.zero_stage or layout.sequence_parallel or layout.recompute == "full":
        raise PlanError(
            f"'{layout}' shards or recomputes: traffic counts layouts without zero, sp and recompute:full. Drop them."
        )
    stages = plan.stages(rank)
    m, tokens = layout.num_microbatches, layout.microbatch_size * model.seq_len
    stream_bytes = 4 * tokens * model.d_model
    found = []
    if layout.tp > 1:
        forward = 2 * sum(len(plan.layers(stage)) for stage in stages)
        ends = (0 in stages) + (plan.num_stages - 1 in stages)
        found.append(Traffic("tp", "all_reduce", m * (forward + ends), stream_bytes))
        forward_bytes = stream_bytes if layout.precision == "fp32" else stream_bytes // 2
        found.append(Traffic("tp", "all_reduce", m * forward, forward_bytes))
        if plan.num_stages - 1 in stages:
            found.append(Traffic("tp", "all_reduce", 3 * m, 4 * tokens))
    if layout.dp > 1:
        found.append(Traffic("dp", "all_reduce", 1, 4 * plan.num_parameters(rank)))
    if sends := sum(_num_sends(plan, stage) for stage in stages):
        found.append(Traffic("pp", "send", m * sends, stream_bytes))
    return found


def _num_sends(plan: Plan, stage: int) -> int:
    """To how many neighbouring stages on other ranks a stage sends for each micro-batch."""
    others = [other for other in (stage - 1, stage + 1) if 0 <= other < plan.num_stages]
    return sum(plan.pp_rank_of(other) != plan.pp_rank_of(stage) for other in others)


def ring_time(num_bytes: float, num_ranks: int, *, alpha_s: float, bytes_per_s: float) -> float:
    """Return the seconds of a ring all-reduce: 2 (N - 1) alpha + 2 (N - 1) / N bytes / bandwidth.

    >>> ring_time(100e6, 4, alpha_s=0.0, bytes_per_s=50e9)
    0.003
    """
    n = whole("num_ranks", num_ranks)
    alpha_s, bytes_per_s = number("alpha_s", alpha_s), number("bytes_per_s", bytes_per_s, positive=True)
    return 2 * (n - 1) * (alpha_s + num_bytes / n / bytes_per_s)


def groups_in_order(plan: Plan, axis: str, order: Sequence[str] = INNER_TO_OUTER) -> list[list[int]]:
    """Return every group of an axis when the mesh has this order, from its innermost axis to its outermost.

    Raises:
        PlanError: no such axis, or an order that has not each axis once.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("dp2 tp2"))
    >>> groups_in_order(built, "tp"), groups_in_order(built, "tp", ("dp", "tp", "pp"))
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    choice("axis", axis, AXES)
    if sorted(order) != sorted(AXES):
        raise PlanError(f"order={shown(order)} is no order of the axes: each of tp, dp and pp comes once.")
    degree: int = getattr(plan.layout, axis)
    stride = math.prod(getattr(plan.layout, inner) for inner in order[: list(order).index(axis)])
    firsts = [rank for rank in range(plan.world_size) if rank // stride % degree == 0]
    return [[first + stride * place for place in range(degree)] for first in firsts]


def num_hosts(plan: Plan, axis: str, ranks_per_host: int, order: Sequence[str] = INNER_TO_OUTER) -> int:
    """Return over how many hosts a group of an axis reaches, at most, when ranks fill hosts one after the other.

    Raises:
        PlanError: as `groups_in_order`.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("dp2 tp2 pp2"))
    >>> [num_hosts(built, axis, 2) for axis in ("tp", "dp", "pp")]
    [1, 2, 2]
    """
    whole("ranks_per_host", ranks_per_host)
    groups = groups_in_order(plan, axis, order)
    return max(len({rank // ranks_per_host for rank in group}) for group in groups)
