"""What one rank's device can do, from data sheets or as it was measured."""

from dataclasses import dataclass
from typing import Self

from labkit.errors import PlanError
from labkit.spec.checks import choice, flag, nearest, number, shown, whole
from labkit.spec.devices import DEVICES, LINKS, SWITCHED, Link
from labkit.spec.layout import PRECISIONS

__all__ = ["Hardware"]

_SHORT = {"a100": "a100-80"}
_RATES = ("fp32_flops", "bf16_flops", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s")
LEAST_SHARE = 1e-6
_SHARES = ("product_efficiency", "memory_efficiency", "network_efficiency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device and its links, in dense (not sparse) operations per second and bytes per second, one direction.

    Attributes:
        name: the device.
        fp32_flops: operations a second in fp32, without tensor cores.
        bf16_flops: operations a second in bf16.
        fp8_flops: operations a second in fp8, or None where the device has no fp8.
        memory_bytes: device memory.
        memory_bytes_per_s: device memory traffic.
        link_bytes_per_s: between two devices of a host.
        network_bytes_per_s: of one device to another host.
        ranks_per_host: devices in a host.
        link_alpha_s: seconds of one hop between devices of a host, without bytes.
        network_alpha_s: seconds of one hop to another host.
        switch_sums: whether the switches between the devices of a host add up what passes (NVLink SHARP).
        product_efficiency: the share of the peak that large products of matrices reach. The one number to calibrate for
            a device and its software.
        memory_efficiency: the share of `memory_bytes_per_s` that kernels reach.
        network_efficiency: the share of the line rates of links and network that collectives reach (NCCL reaches 230
            of 300 GB/s over NVLink 3, 360 of 450 over NVLink 4, 46 of 50 over a 400 Gb/s port).

    Raises:
        PlanError: a field of the wrong type or out of range.

    >>> Hardware.preset("h100").peak_flops("bf16")
    989500000000000.0
    """

    name: str
    fp32_flops: float
    bf16_flops: float
    fp8_flops: float | None
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    ranks_per_host: int = 8
    link_alpha_s: float = LINKS["nvlink4"].alpha_s
    network_alpha_s: float = LINKS["ib-ndr"].alpha_s
    switch_sums: bool = False
    product_efficiency: float = 0.8
    memory_efficiency: float = 0.8
    network_efficiency: float = 0.8

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name.strip():
            raise PlanError(f"name={shown(self.name)} is no text: name the device, such as 'h100'.")
        for rate in _RATES:
            object.__setattr__(self, rate, _rate(rate, getattr(self, rate)))
        if self.fp8_flops is not None:
            object.__setattr__(self, "fp8_flops", _rate("fp8_flops", self.fp8_flops))
        for latency in ("link_alpha_s", "network_alpha_s"):
            object.__setattr__(self, latency, number(latency, getattr(self, latency)))
        object.__setattr__(self, "switch_sums", flag("switch_sums", self.switch_sums))
        for share in _SHARES:
            object.__setattr__(self, share, _share(share, getattr(self, share)))
        object.__setattr__(self, "memory_bytes", whole("memory_bytes", self.memory_bytes, maximum=2**60))
        object.__setattr__(self, "ranks_per_host", whole("ranks_per_host", self.ranks_per_host))

    @classmethod
    def preset(cls, name: str, *, link: str | None = None, network: str | None = None) -> Self:
        """Return a device by name, with its usual links or others.

        Args:
            name: one of `labkit.spec.DEVICES`; "a100" is the one with 80 GB.
            link: one of `labkit.spec.LINKS` between the devices of a host.
            network: one of them between hosts.

        Raises:
            PlanError: no such device or link.

        >>> Hardware.preset("h200").memory_bytes
        141000000000
        >>> Hardware.preset("h100", network="roce-100").network_bytes_per_s
        12500000000.0
        """
        given: object = name
        short = _SHORT.get(given, given) if isinstance(given, str) else None
        if short is None or short not in DEVICES:
            guess = nearest(given, DEVICES) if isinstance(given, str) else None
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise PlanError(f"device {shown(given)} is unknown: the devices are {', '.join(DEVICES)}.{hint}")
        fields = dict(DEVICES[short])
        fields["switch_sums"] = short in SWITCHED
        near, far = fields.pop("link"), fields.pop("network")
        near_link, far_link = (
            _link("link", near if link is None else link),
            _link("network", far if network is None else network),
        )
        return cls(
            name=short,
            link_alpha_s=near_link.alpha_s,
            link_bytes_per_s=near_link.bytes_per_s,
            network_alpha_s=far_link.alpha_s,
            network_bytes_per_s=far_link.bytes_per_s,
            **fields,  # type: ignore[arg-type]
        )

    @classmethod
    def find(cls, device_name: str) -> Self | None:
        """Return the device that a driver's name means (`torch.cuda.get_device_name()`), or None if unlisted.

        >>> Hardware.find("NVIDIA H100 80GB HBM3").name
        'h100'
        >>> Hardware.find("cpu") is None
        True
        """
        given: object = device_name
        if not isinstance(given, str):
            raise PlanError(f"device_name={shown(given)} is no text: give what torch.cuda.get_device_name() returns.")
        words = set(device_name.lower().replace("-", " ").split())
        if {"pcie", "nvl", "mig", "laptop"} & words:  # DEVICES holds whole SXM modules and desktop cards
            return None
        if "a100" in words:
            return cls.preset("a100-40" if "40gb" in words else "a100-80")
        if {"rtx", "4090"} <= words:
            return cls.preset("rtx4090")
        return next((cls.preset(name) for name in DEVICES if name in words), None)

    def peak_flops(self, precision: str) -> float:
        """Return operations a second at `precision`.

        Raises:
            PlanError: an unknown precision, or fp8 on a device without it.

        >>> Hardware.preset("a100").peak_flops("fp32")
        19500000000000.0
        """
        choice("precision", precision, PRECISIONS)
        peaks = {"fp32": self.fp32_flops, "bf16": self.bf16_flops, "fp8": self.fp8_flops}
        peak = peaks[precision]
        if peak is None:
            raise PlanError(f"{self.name} has no {precision}: its data sheet lists none. Use precision='bf16'.")
        return peak


def _rate(name: str, value: object) -> float:
    """A rate of 1 or more, with an H100's as the fix."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 1:
        usual = Hardware.preset("h100")
        raise PlanError(
            f"{name}={shown(value)}: at less than 1 a second nothing ever ends, a rate is 1 or more. An H100 has "
            f"{name}={getattr(usual, name):g}."
        )
    return number(name, value, minimum=1)


def _share(name: str, value: object) -> float:
    share = number(name, value, minimum=LEAST_SHARE)
    if share > 1:
        fix = f" Use {name}={share / 100:g}." if share <= 100 else ""
        raise PlanError(f"{name}={shown(value)} is above 1: it is a share of the data sheet's rate.{fix}")
    return share


def _link(name: str, value: object) -> Link:
    return LINKS[choice(name, value, tuple(LINKS))]
