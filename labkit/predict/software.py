"""How a trainer runs a step, as far as that changes what it costs: attention, element sizes, what hides behind what."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from labkit.errors import PlanError
from labkit.spec.checks import flag, nearest, number, shown, whole

__all__ = ["SOFTWARE", "Software"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What a predicted step assumes of the program that runs it.

    Attributes:
        flash_attention: whether scores stay on the chip (Dao et al. 2022, arXiv 2205.14135); else every score is
            written and read again.
        skips_masked: whether scores of later tokens are never computed: half of all.
        stream_bytes: of an element of the residual stream in bf16 and fp8, and so of what goes to other stages and of
            gradients that are summed over tp; forward, sums have two bytes an element.
        gradient_bytes: of an element of a gradient that is summed over dp.
        splits_sends: whether tensor-parallel ranks send a part each of what goes to the next stage.
        kernel_s: seconds that each kernel takes beyond its work.
        launch_s: seconds that the program takes to start a kernel: a device that is done sooner waits for the next.
        call_s: seconds that each collective within a layer takes beyond its work: starting it, waiting for the last.
        tp_hidden: share of the collectives over tp that runs while the device computes.
        dp_hidden: share of the collectives over dp that does, as long as there is computation to hide behind.

    Raises:
        PlanError: a field of the wrong type or out of range.

    >>> Software.preset("megatron").stream_bytes
    2
    """

    flash_attention: bool = True
    skips_masked: bool = True
    stream_bytes: int = 4
    gradient_bytes: int = 4
    splits_sends: bool = False
    kernel_s: float = 5e-6
    launch_s: float = 5e-6
    call_s: float = 0.0
    tp_hidden: float = 0.0
    dp_hidden: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flash_attention", "skips_masked", "splits_sends"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        for name in ("stream_bytes", "gradient_bytes"):
            object.__setattr__(self, name, whole(name, getattr(self, name), maximum=8))
        for name in ("kernel_s", "launch_s", "call_s"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        for name in ("tp_hidden", "dp_hidden"):
            value = number(name, getattr(self, name))
            if value > 1:
                raise PlanError(f"{name}={shown(value)} is above 1: it is a share of the time. Use {name}=1.")
            object.__setattr__(self, name, value)

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return a program by name; `labkit.predict.SOFTWARE` lists them.

        Raises:
            PlanError: no such program.
        """
        given: object = name
        if isinstance(given, str) and given in SOFTWARE:
            return cls(**SOFTWARE[given])  # type: ignore[arg-type]
        guess = nearest(given, SOFTWARE) if isinstance(given, str) else None
        hint = f" Did you mean {guess!r}?" if guess else ""
        raise PlanError(f"software {shown(given)} is unknown: known are {', '.join(SOFTWARE)}.{hint}")


SOFTWARE: Mapping[str, Mapping[str, float | int | bool]] = MappingProxyType(
    {
        "lab": MappingProxyType({}),
        "megatron-2021": MappingProxyType(
            {
                "flash_attention": False,
                "skips_masked": False,
                "stream_bytes": 2,
                "gradient_bytes": 2,
                "splits_sends": True,
                "kernel_s": 10e-6,
                "launch_s": 50e-6,
                "call_s": 100e-6,
            }
        ),
        "megatron": MappingProxyType(
            {"stream_bytes": 2, "splits_sends": True, "kernel_s": 10e-6, "tp_hidden": 0.7, "dp_hidden": 0.9}
        ),
    }
)
"""Programs by name: this lab; Megatron-LM as of its papers of 2021 and 2022 (arXiv 2104.04473, 2205.05198: no flash
attention, nothing overlapped, 16-bit gradients; DeepSpeed's fork of it alike); Megatron Core with Transformer Engine,
which overlaps sums over tp with products and gradients with the backward."""
