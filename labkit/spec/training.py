"""What a training run does besides its plan: steps, optimizer, data, an FP8 recipe, and a declared pace."""

import os
from dataclasses import dataclass

from labkit.errors import PlanError
from labkit.spec.checks import choice, flag, number, shown, whole
from labkit.spec.fp8 import Fp8

__all__ = ["Pace", "Training"]

OPTIMIZERS = ("adamw", "sgd")
STARTS = ("fresh", "live")

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Declared durations: each forward and backward of one stage and micro-batch lasts at least this long.

    The work is real; the rank then sleeps until the declared duration is over. So on a machine with fewer cores than
    ranks, order, communication and waiting stay real while durations are as declared.

    Attributes:
        forward_s: seconds of one forward, for every stage or for each stage.
        backward_s: seconds of one backward, likewise; its halves, where a schedule splits it, take half of that each.

    Raises:
        PlanError: a duration that is not a positive number, or above an hour.

    >>> Pace(forward_s=0.05, backward_s=0.1)
    Pace(forward_s=0.05, backward_s=0.1)
    """

    forward_s: float | tuple[float, ...]
    backward_s: float | tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s"):
            given = getattr(self, name)
            if isinstance(given, list | tuple) and given:
                each = [number(f"Pace.{name}[{i}]", one, below=3600.0, positive=True) for i, one in enumerate(given)]
                object.__setattr__(self, name, tuple(each))
            else:
                object.__setattr__(self, name, number(f"Pace.{name}", given, below=3600.0, positive=True))

    def check_stages(self, num_stages: int) -> None:
        """Raise PlanError unless durations given for each stage are as many as the stages."""
        for name in ("forward_s", "backward_s"):
            declared_s = getattr(self, name)
            if isinstance(declared_s, tuple) and len(declared_s) != num_stages:
                stages = f"{num_stages} stage{'s' * (num_stages != 1)}"
                raise PlanError(
                    f"Pace.{name} has {len(declared_s)} durations for {stages}: give one for each stage, or one number "
                    "for all."
                )

    def seconds(self, kind: str, stage: int) -> float:
        """Return the declared duration of a stage's computation: F, B, I or W.

        >>> Pace(forward_s=[0.05, 0.2], backward_s=0.1).seconds("F", 1)
        0.2
        >>> Pace(forward_s=0.05, backward_s=0.1).seconds("W", 0)
        0.05
        """
        declared_s = self.forward_s if kind == "F" else self.backward_s
        whole_s = declared_s[stage] if isinstance(declared_s, tuple) else declared_s
        return whole_s if kind in ("F", "B") else whole_s / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training run's settings.

    Attributes:
        num_steps: optimizer steps.
        seed: of initialisation and samples; samples depend on seed, step and global batch size only.
        optimizer: "adamw" (Loshchilov and Hutter 2019, arXiv 1711.05101) or "sgd" (no momentum).
        learning_rate: constant over the run.
        betas: AdamW's two decay rates.
        weight_decay: decoupled for AdamW, added to the gradient for SGD.
        clip_norm: largest global gradient norm; None = no clipping.
        start: "fresh" or "live" (go on with the state that the ranks hold).
        data: a file or folder to train on, read as bytes; None = the Python standard library's source.
        pace: declared durations, or None.
        trace: whether ranks record events.
        fp8: how a layout with precision "fp8" casts; None = `Fp8()`, delayed scaling.
        record_fp8: whether ranks record what the casts to FP8 do to every tensor.

    Raises:
        PlanError: a field of the wrong type or out of range.

    >>> Training(num_steps=5, optimizer="sgd", learning_rate=0.1).betas
    (0.9, 0.95)
    """

    num_steps: int
    seed: int = 0
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    start: str = "fresh"
    data: str | None = None
    pace: Pace | None = None
    trace: bool = True
    fp8: Fp8 | None = None
    record_fp8: bool = False

    def __post_init__(self) -> None:
        clean: dict[str, object] = {
            "num_steps": whole("num_steps", self.num_steps),
            "seed": whole("seed", self.seed, minimum=0, maximum=LARGEST_SEED),
            "optimizer": choice("optimizer", self.optimizer, OPTIMIZERS),
            "learning_rate": number("learning_rate", self.learning_rate),
            "betas": _betas(self.betas),
            "weight_decay": number("weight_decay", self.weight_decay),
            "start": choice("start", self.start, STARTS),
            "data": _data(self.data),
            "trace": flag("trace", self.trace),
            "record_fp8": flag("record_fp8", self.record_fp8),
        }
        if self.clip_norm is not None:
            clean["clip_norm"] = number("clip_norm", self.clip_norm, positive=True)
        if self.pace is not None and not isinstance(self.pace, Pace):
            raise PlanError(f"pace={shown(self.pace)} is no Pace: use Pace(forward_s=0.05, backward_s=0.1) or None.")
        if self.fp8 is not None and not isinstance(self.fp8, Fp8):
            raise PlanError(f"fp8={shown(self.fp8)} is no Fp8: use Fp8(recipe='current') or None.")
        for name, value in clean.items():
            object.__setattr__(self, name, value)

    def check_precision(self, precision: str) -> None:
        """Raise PlanError unless what is asked of FP8 goes with a layout's precision."""
        asked = "fp8" if self.fp8 is not None else "record_fp8" if self.record_fp8 else None
        if asked is not None and precision != "fp8":
            raise PlanError(
                f"{asked}={shown(getattr(self, asked))} with precision={precision!r}: nothing is cast to FP8 there. "
                f"Use the token fp8 in the layout, or drop {asked}."
            )


def _betas(value: object) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise PlanError(f"betas={shown(value)} is no pair: AdamW decays with two rates. Use betas=(0.9, 0.95).")
    first, second = value
    return number("betas[0]", first, below=1.0), number("betas[1]", second, below=1.0)


def _data(value: object) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise PlanError(f"data={shown(value)} is no path: give a file or folder, or None to train on Python's source.")
    return path
