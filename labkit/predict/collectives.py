"""Seconds of collectives and messages, by alpha and beta: latencies of hops, and bytes over bandwidth."""

import math
from typing import NamedTuple

from labkit.errors import PlanError
from labkit.spec import Hardware
from labkit.spec.checks import choice, number, shown, whole

__all__ = ["COLLECTIVES", "Reach", "collective_time", "reach"]

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")


class Reach(NamedTuple):
    """How a group of ranks lies on hosts.

    Attributes:
        num_ranks: its members.
        num_hosts: the hosts that they are on, each with equally many.
    """

    num_ranks: int
    num_hosts: int


class _Protocol(NamedTuple):
    """How NCCL moves bytes: what starting costs, each hop within a host and between hosts, and what is left of a link.

    The bytes of LL carry a flag for every four, those of LL128 for every 120.
    """

    base_s: float
    link_hop: float
    network_hop: float
    share: float


_PROTOCOLS = (
    _Protocol(base_s=8.4e-6, link_hop=1.0, network_hop=1.0, share=1.0),  # Simple
    _Protocol(base_s=14e-6, link_hop=0.56, network_hop=0.29, share=0.92),  # LL128
    _Protocol(base_s=6.6e-6, link_hop=0.18, network_hop=0.19, share=0.35),  # LL
)
"""NVIDIA/nccl, src/graph/tuning.cc: base latencies, hops as parts of Simple's, LL's bandwidth of Ampere and Hopper."""

SWITCH_START_S, SWITCH_SHARE = 8.4e-6 + 2 * 25e-6, 1.3
"""Simple's start and the same file's latency of NVLS, up and down; nccl-tests print 480 GB/s on 8 H100 where rings
reach 370 (a DGX H100's log)."""


def reach(num_ranks: int, stride: int, ranks_per_host: int) -> Reach:
    """Return how a group of ranks 0, `stride`, 2 `stride`, ... lies on hosts that ranks fill in order.

    Raises:
        PlanError: one of them is no whole number of 1 or more.

    >>> reach(4, 8, 8), reach(16, 4, 8), reach(8, 1, 8)
    (Reach(num_ranks=4, num_hosts=4), Reach(num_ranks=16, num_hosts=8), Reach(num_ranks=8, num_hosts=1))
    """
    num_ranks, stride, ranks_per_host = (
        whole(name, value)
        for name, value in (("num_ranks", num_ranks), ("stride", stride), ("ranks_per_host", ranks_per_host))
    )
    every = stride >= ranks_per_host  # no two of them on one host
    return Reach(num_ranks, num_ranks if every else (num_ranks - 1) * stride // ranks_per_host + 1)


def collective_time(kind: str, num_bytes: float, group: Reach, hardware: Hardware) -> float:
    """Return the seconds of a collective over a tensor of `num_bytes`, each rank's whole input or result.

    As NCCL's own model has it (src/graph/tuning.cc): a start, hops, and bytes over what the slowest link of the path
    carries, for rings and trees and three protocols, of which the fastest is taken. A ring all-reduce takes 2 (N - 1)
    hops, 2 (H - 1) of them between hosts, a tree 2 (N / H - 1 + log2 H). 2 (n - 1) / n of the bytes pass each of the n
    devices of a host, and 2 (H - 1) / H the ports that a host's members use together; both at once, so the slower
    counts. A reduce-scatter, an all-gather and an all-to-all take half of both; a broadcast and a message send every
    byte once. Where switches add up (Hopper and later), an all-reduce within a host may leave that to them.
    `network_efficiency` of the line rates is reached.

    Args:
        kind: one of `COLLECTIVES`.
        num_bytes: of the tensor, before a reduce-scatter and after an all-gather.
        group: who takes part.
        hardware: links.

    Raises:
        PlanError: no such kind, bytes that are no number of 0 or more, no group or no hardware.

    >>> h100 = Hardware.preset("h100")
    >>> [round(1e6 * collective_time("all_reduce", size, Reach(8, 1), h100)) for size in (1024, 2**30)]
    [15, 4073]
    """
    choice("kind", kind, COLLECTIVES)
    if not isinstance(group, Reach):
        raise PlanError(f"group={shown(group)} is no Reach: use labkit.predict.reach(num_ranks, stride, 8).")
    if not isinstance(hardware, Hardware):
        raise PlanError(f"hardware={shown(hardware)} is no Hardware: use labkit.spec.Hardware.preset('h100').")
    num_bytes = number("num_bytes", num_bytes)
    num_ranks, num_hosts = whole("num_ranks", group.num_ranks), whole("num_hosts", group.num_hosts)
    if num_ranks == 1:
        return 0.0
    rounds = 2 if kind == "all_reduce" else 1
    far = rounds * (num_hosts - 1)
    paths: list[tuple[float, float]] = [(rounds * (num_ranks - 1) - far, far)]
    if kind in ("all_reduce", "broadcast"):
        paths.append((rounds * (num_ranks / num_hosts - 1), rounds * math.log2(num_hosts)))
    if kind == "send":
        paths = [(0, 1) if num_hosts > 1 else (1, 0)]
    moving_s = _moving_s(kind, num_bytes, num_ranks, num_hosts, hardware)
    times = [
        one.base_s
        + near_hops * one.link_hop * hardware.link_alpha_s
        + far_hops * one.network_hop * hardware.network_alpha_s
        + moving_s / one.share
        for one in _PROTOCOLS
        for near_hops, far_hops in paths
    ]
    if kind == "all_reduce" and num_hosts == 1 and hardware.switch_sums:
        times.append(SWITCH_START_S + moving_s / SWITCH_SHARE)
    return min(times)


def _moving_s(kind: str, num_bytes: float, num_ranks: int, num_hosts: int, hardware: Hardware) -> float:
    """Seconds of the bytes alone, through the devices of a host or through its ports, whichever is slower."""
    rounds = 2 if kind == "all_reduce" else 1
    members = max(1, num_ranks // num_hosts)
    if kind in ("broadcast", "send"):
        within, between = 1.0, 1.0 if num_hosts > 1 else 0.0
    else:
        within, between = rounds * (members - 1) / members, rounds * (num_hosts - 1) / num_hosts
    ports = 1 if kind == "send" else members
    within_s = within * num_bytes / hardware.link_bytes_per_s
    between_s = between * num_bytes / (ports * hardware.network_bytes_per_s)
    return max(within_s if members > 1 or kind == "send" else 0.0, between_s) / hardware.network_efficiency
