"""How fast a run was: tokens per second, and the share of the hardware's peak that it used."""

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.plan import Plan
from labkit.spec import Hardware

__all__ = ["Efficiency", "efficiency", "tokens_per_second"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Model FLOPs utilisation, or why there is none.

    Attributes:
        mfu: useful operations per second over the peak of all ranks that took part, 0 to 1; None: no peak is known.
        reason: why `mfu` is None, or which peak it was measured against.
    """

    mfu: float | None
    reason: str


def tokens_per_second(tokens_per_step: int, step_s: Sequence[float]) -> float | None:
    """Tokens of all steps over their time; the first step, which warms up, counts only where it is the only one.

    >>> tokens_per_second(100, [9.0, 1.0, 1.0])
    100.0
    """
    counted = [s for s in (step_s[1:] if len(step_s) > 1 else step_s) if s > 0]
    return len(counted) * tokens_per_step / sum(counted) if counted else None


def efficiency(plan: Plan, tokens_per_s: float | None, devices: Sequence[str]) -> Efficiency:
    """The share of the devices' peak that useful work took.

    Args:
        plan: what was trained.
        tokens_per_s: global tokens per second.
        devices: the device name of every rank that took part, as its driver gives it.
    """
    names = sorted(set(devices))
    if len(names) != 1:
        return Efficiency(mfu=None, reason=f"ranks run on different devices ({', '.join(names)}): there is no one peak")
    hardware = Hardware.find(names[0])
    if hardware is None:
        return Efficiency(mfu=None, reason=f"no peak is known for {names[0]}: `labkit.spec.DEVICES` lists what is")
    if not tokens_per_s:
        return Efficiency(mfu=None, reason="no step has finished yet")
    precision = plan.layout.precision
    peak = hardware.peak_flops(precision)
    return Efficiency(
        mfu=plan.model.flops_per_token * tokens_per_s / (peak * plan.world_size),
        reason=f"of {plan.world_size} x {peak / 1e12:g} TFLOP/s: {hardware.name} in {precision}",
    )
