"""What one rank's device can do, from data sheets."""

from dataclasses import dataclass
from typing import Self

from labkit.errors import PlanError
from labkit.spec.checks import choice, nearest, number, shown, whole
from labkit.spec.layout import PRECISIONS

__all__ = ["DEVICES", "Hardware"]


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

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name.strip():
            raise PlanError(f"name={shown(self.name)} is no text: name the device, such as 'h100'.")
        rates = ("fp32_flops", "bf16_flops", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s")
        for rate in rates:
            object.__setattr__(self, rate, number(rate, getattr(self, rate), positive=True))
        if self.fp8_flops is not None:
            object.__setattr__(self, "fp8_flops", number("fp8_flops", self.fp8_flops, positive=True))
        object.__setattr__(self, "memory_bytes", whole("memory_bytes", self.memory_bytes, maximum=2**60))
        object.__setattr__(self, "ranks_per_host", whole("ranks_per_host", self.ranks_per_host))

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return a device by name; `labkit.spec.DEVICES` lists them.

        Raises:
            PlanError: no such device.

        >>> Hardware.preset("h200").memory_bytes
        141000000000
        """
        given: object = name
        if isinstance(given, str) and given in DEVICES:
            return cls(name=given, **DEVICES[given])  # type: ignore[arg-type]
        guess = nearest(given, DEVICES) if isinstance(given, str) else None
        hint = f" Did you mean {guess!r}?" if guess else ""
        raise PlanError(f"device {shown(given)} is unknown: the devices are {', '.join(DEVICES)}.{hint}")

    @classmethod
    def find(cls, device_name: str) -> Self | None:
        """Return the device that a driver's name means (`torch.cuda.get_device_name()`), or None if unlisted.

        >>> Hardware.find("NVIDIA H100 80GB HBM3").name
        'h100'
        >>> Hardware.find("cpu") is None
        True
        """
        words = device_name.lower().replace("-", " ").split()
        if {"pcie", "nvl", "mig", "40gb"} & set(words):  # DEVICES holds whole SXM modules
            return None
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


DEVICES: dict[str, dict[str, float | int | None]] = {
    "a100": {
        "fp32_flops": 19.5e12,
        "bf16_flops": 312e12,
        "fp8_flops": None,
        "memory_bytes": 80 * 10**9,
        "memory_bytes_per_s": 2.039e12,
        "link_bytes_per_s": 300e9,
        "network_bytes_per_s": 25e9,
    },
    "h100": {
        "fp32_flops": 67e12,
        "bf16_flops": 989.5e12,
        "fp8_flops": 1979e12,
        "memory_bytes": 80 * 10**9,
        "memory_bytes_per_s": 3.35e12,
        "link_bytes_per_s": 450e9,
        "network_bytes_per_s": 50e9,
    },
    "h200": {
        "fp32_flops": 67e12,
        "bf16_flops": 989.5e12,
        "fp8_flops": 1979e12,
        "memory_bytes": 141 * 10**9,
        "memory_bytes_per_s": 4.8e12,
        "link_bytes_per_s": 450e9,
        "network_bytes_per_s": 50e9,
    },
}
"""SXM modules from NVIDIA's data sheets (A100 80GB, H100, H200; sparse figures halved), NVLink per direction, and one
200 Gb/s (A100) or 400 Gb/s network port for each device as in the DGX reference designs."""
