"""What a step on a cluster is made of: compute, bubble, communication over each axis; by arithmetic, on assumptions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.predict.timeline import bubble_fraction
from labkit.predict.traffic import INNER_TO_OUTER, num_hosts, ring_time, traffic
from labkit.spec import Hardware
from labkit.spec.checks import number

__all__ = ["Shares", "shares"]

FAST_ALPHA_S = 5e-6
SLOW_ALPHA_S = 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Seconds of one step, one after the other: nothing overlaps, which is the worst case.

    Attributes:
        compute_s: products of matrices, on every rank alike.
        bubble_s: waiting for the pipeline to fill and to drain.
        tp_s: sums over tensor-parallel ranks, in the stages' way.
        pp_s: sends to the neighbouring stage.
        dp_s: the sum of the gradients.
    """

    compute_s: float
    bubble_s: float
    tp_s: float
    pp_s: float
    dp_s: float

    @property
    def step_s(self) -> float:
        """All of them together."""
        return self.compute_s + self.bubble_s + self.tp_s + self.pp_s + self.dp_s


def shares(plan: Plan, hardware: Hardware, *, efficiency: float = 0.4, order: Sequence[str] = INNER_TO_OUTER) -> Shares:
    """Simulate a step under 1F1B or GPipe by arithmetic.

    A group that lies within a host talks over its fast link, another over the network, where its ranks on a host use
    their ports together; latencies are assumed: 5 and 20 microseconds a message. The bubble holds up compute and tp
    alike. In bf16 activations travel in two bytes, as large trainers send them; gradients are summed in fp32.

    Args:
        plan: the plan; its middle stage counts.
        hardware: speeds, and ranks on a host.
        efficiency: the share of the peak speed that products of matrices reach: assumed.
        order: the mesh's axes from innermost to outermost.

    Raises:
        PlanError: another schedule, or a layout that `traffic` does not count.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("llama3-70b"), Layout.parse("tp8 pp2 m16 bf16"))
    >>> found = shares(built, Hardware.preset("h100"))
    >>> round(found.bubble_s / (found.compute_s + found.tp_s), 4), 1 / 16
    (0.0625, 0.0625)
    """
    layout = plan.layout
    if layout.schedule not in ("1f1b", "gpipe"):
        raise PlanError(
            f"schedule={layout.schedule!r} in '{layout}': shares computes the bubble of 1f1b and gpipe, one stage per "
            "rank. Use 1f1b."
        )
    peak = hardware.peak_flops(layout.precision) * number("efficiency", efficiency, positive=True)
    compute_s = plan.flops_per_step / plan.world_size / peak
    seconds = {"tp": 0.0, "pp": 0.0, "dp": 0.0}
    width = 1.0 if layout.precision == "fp32" else 0.5
    counted = traffic(replace(plan, layout=replace(layout, precision="fp32")), plan.rank_at(pp_rank=layout.pp // 2))
    for one in counted:
        num_bytes = one.num_bytes * (1.0 if one.axis == "dp" else width)
        degree: int = getattr(layout, one.axis)
        reach = num_hosts(plan, one.axis, hardware.ranks_per_host, order)
        alpha_s, bytes_per_s = _link(hardware, degree, reach)
        each_s = alpha_s + num_bytes / bytes_per_s
        if one.kind == "all_reduce":
            each_s = ring_time(num_bytes, degree, alpha_s=alpha_s, bytes_per_s=bytes_per_s)
        seconds[one.axis] += one.num_calls * each_s
    idle = bubble_fraction(plan.num_stages, layout.num_microbatches)
    bubble_s = (compute_s + seconds["tp"]) * idle / (1 - idle)
    return Shares(compute_s=compute_s, bubble_s=bubble_s, tp_s=seconds["tp"], pp_s=seconds["pp"], dp_s=seconds["dp"])


def _link(hardware: Hardware, degree: int, reach: int) -> tuple[float, float]:
    """Latency and bytes a second of a ring of `degree` ranks on `reach` hosts: it enters each host once."""
    if reach == 1:
        return FAST_ALPHA_S, hardware.link_bytes_per_s
    return SLOW_ALPHA_S, min(hardware.link_bytes_per_s, hardware.network_bytes_per_s * (degree // reach))
