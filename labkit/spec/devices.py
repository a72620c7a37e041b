"""Published speeds of devices and of the links between them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["DEVICES", "LINKS", "SWITCHED", "Link"]


class Link(NamedTuple):
    """What a message costs: `alpha_s + num_bytes / bytes_per_s`.

    Attributes:
        alpha_s: seconds of a message without bytes, of one hop within a collective.
        bytes_per_s: one direction, of one device.
    """

    alpha_s: float
    bytes_per_s: float


NVLINK_HOP_S, PCIE_HOP_S, NETWORK_HOP_S, TCP_HOP_S = 3.4e-6, 5.7e-6, 14e-6, 50e-6

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink3": Link(NVLINK_HOP_S, 300e9),
        "nvlink4": Link(NVLINK_HOP_S, 450e9),
        "nvlink5": Link(NVLINK_HOP_S, 900e9),
        "pcie4": Link(PCIE_HOP_S, 31.5e9),
        "pcie5": Link(PCIE_HOP_S, 63e9),
        "ib-hdr": Link(NETWORK_HOP_S, 25e9),
        "ib-ndr": Link(NETWORK_HOP_S, 50e9),
        "ib-xdr": Link(NETWORK_HOP_S, 100e9),
        "roce-100": Link(NETWORK_HOP_S, 12.5e9),
        "roce-200": Link(NETWORK_HOP_S, 25e9),
        "roce-400": Link(NETWORK_HOP_S, 50e9),
        "ethernet-10": Link(TCP_HOP_S, 1.25e9),
        "ethernet-25": Link(TCP_HOP_S, 3.125e9),
    }
)
"""Links by name. Bandwidths are line rates: NVLink from NVIDIA's A100, H100 and B200 data sheets (half of what both
directions have together), PCIe from PCI-SIG's 16 lanes of 16 and 32 GT/s, InfiniBand HDR, NDR and XDR and RoCE from
their 200, 400 and 800 (and 100) Gb/s ports, Ethernet from its name. Latencies of a hop are those of NCCL's own model
for its protocol Simple (NVIDIA/nccl, src/graph/tuning.cc): 3.4 microseconds over NVLink, 5.7 over PCIe, 14 over a
network; TCP, which is not in it, is taken as 50."""

_Fields = dict[str, float | int | str | None]

_SXM_H: _Fields = {"fp32_flops": 67e12, "bf16_flops": 989.5e12, "fp8_flops": 1979e12, "product_efficiency": 0.80}
_B: _Fields = {"fp32_flops": 75e12, "memory_bytes_per_s": 8e12, "link": "nvlink5", "network": "ib-ndr"}

DEVICES: Mapping[str, _Fields] = MappingProxyType(
    {
        "a100-40": {
            "fp32_flops": 19.5e12,
            "bf16_flops": 312e12,
            "fp8_flops": None,
            "product_efficiency": 0.86,
            "memory_bytes": 40 * 10**9,
            "memory_bytes_per_s": 1.555e12,
            "link": "nvlink3",
            "network": "ib-hdr",
        },
        "a100-80": {
            "fp32_flops": 19.5e12,
            "bf16_flops": 312e12,
            "fp8_flops": None,
            "product_efficiency": 0.86,
            "memory_bytes": 80 * 10**9,
            "memory_bytes_per_s": 2.039e12,
            "link": "nvlink3",
            "network": "ib-hdr",
        },
        "h100": _SXM_H
        | {
            "memory_bytes": 80 * 10**9,
            "memory_bytes_per_s": 3.35e12,
            "link": "nvlink4",
            "network": "ib-ndr",
        },
        "h200": _SXM_H
        | {
            "memory_bytes": 141 * 10**9,
            "memory_bytes_per_s": 4.8e12,
            "link": "nvlink4",
            "network": "ib-ndr",
        },
        "b200": _B
        | {
            "bf16_flops": 2250e12,
            "fp8_flops": 4500e12,
            "product_efficiency": 0.78,
            "memory_bytes": 180 * 10**9,
        },
        "gb200": _B
        | {
            "bf16_flops": 2500e12,
            "fp8_flops": 5000e12,
            "product_efficiency": 0.78,
            "memory_bytes": 186 * 10**9,
            "ranks_per_host": 72,
        },
        "rtx4090": {
            "fp32_flops": 82.6e12,
            "bf16_flops": 165.2e12,
            "fp8_flops": 330.3e12,
            "product_efficiency": 0.90,
            "memory_bytes": 24 * 10**9,
            "memory_bytes_per_s": 1.008e12,
            "link": "pcie4",
            "network": "ethernet-25",
        },
    }
)
"""Devices by name, in dense operations a second (sparse figures halved).

Sources: NVIDIA's data sheets of the SXM modules A100 (40 and 80 GB), H100, H200 and HGX B200, of the GB200 NVL72 (whose
72 devices are one host here: one NVLink domain), and the Ada architecture's white paper (RTX 4090, products summed in
fp32). Networks are those of the DGX reference designs, one 200 or 400 Gb/s port for each device; the RTX 4090 has what
a workstation has, PCIe 4 and 25 Gb/s Ethernet. `product_efficiency` is the largest share of the bf16 peak that a
product of matrices was seen to reach (Bekman, "Machine Learning Engineering", maximum achievable matmul FLOPS: 268 of
312 on A100, 794 of 989 on H100, 1745 of 2250 on B200); for GB200 and RTX 4090 that of their relatives is taken."""

SWITCHED = ("h100", "h200", "b200", "gb200")
"""Devices whose NVLink switches add up what passes (NVLink SHARP, from the third generation of NVSwitch on)."""
