"""How a training step is laid out over ranks, as fields and as one line of text."""

import re
from dataclasses import dataclass
from typing import Self, cast

from labkit.errors import PlanError
from labkit.spec.checks import choice, flag, nearest, shown, whole

__all__ = ["Layout"]

SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v", "own")
PRECISIONS = ("fp32", "bf16", "fp8")
RECOMPUTES = ("none", "selective", "full")
OFFLOADS = ("none", "optimizer", "all")
ENGINES = ("auto", "torch", "deepspeed")

LARGEST_DEGREE = 65_536
"""Largest degree, number of micro-batches or micro-batch size: four times the largest published run."""

_COUNTS = {
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "zero": "zero_stage",
    "v": "num_virtual_stages",
    "m": "num_microbatches",
    "b": "microbatch_size",
    "hybrid": "hybrid",
}
_WORDS: dict[str, tuple[str, object]] = (
    {name: ("schedule", name) for name in SCHEDULES}
    | {name: ("precision", name) for name in PRECISIONS}
    | {f"recompute:{name}": ("recompute", name) for name in RECOMPUTES[1:]}
    | {f"offload:{name}": ("offload", name) for name in OFFLOADS[1:]}
    | {name: ("engine", name) for name in ENGINES[1:]}
    | {
        "sp": ("sequence_parallel", True),
        "reshard": ("reshard_after_forward", True),
        "no_reshard": ("reshard_after_forward", False),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The degrees, schedule and precision of a training step.

    Attributes:
        dp: data-parallel degree.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        zero_stage: what is sharded over dp: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters
            (Rajbhandari et al. 2020, arXiv 1910.02054).
        schedule: order of forwards and backwards in the pipeline; "own" is one given to `labkit.plan.build` as text.
        num_microbatches: micro-batches of a step per dp rank; None = `2 pp` when `pp > 1`, else 1. An int once the
            layout exists. With `pp = 1` they are gradient accumulation.
        microbatch_size: samples in a micro-batch.
        num_virtual_stages: stages that each pp rank holds.
        precision: "fp32", "bf16" (fp32 master weights and gradient reduction) or "fp8".
        sequence_parallel: whether norms are split over the sequence within tp.
        recompute: activations computed again in the backward: "none", "selective" or "full".
        offload: what lives in host memory: "none", "optimizer" or "all".
        engine: "auto", "torch" or "deepspeed".
        reshard_after_forward: whether ZeRO-3 drops gathered parameters after the forward; None = the engine's default.
        hybrid: replicas of a sharded group within dp.

    Fields are checked one by one here; `labkit.plan.build` checks them together and with a model.

    Raises:
        PlanError: a field of the wrong type or out of range.

    >>> layout = Layout(dp=2, pp=2, precision="bf16")
    >>> str(layout), layout.world_size, layout.global_batch_size
    ('dp2 pp2 1f1b m4 bf16', 4, 8)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 0
    schedule: str = "1f1b"
    num_microbatches: int = cast(int, None)  # None chooses; an int once the layout exists
    microbatch_size: int = 1
    num_virtual_stages: int = 1
    precision: str = "fp32"
    sequence_parallel: bool = False
    recompute: str = "none"
    offload: str = "none"
    engine: str = "auto"
    reshard_after_forward: bool | None = None
    hybrid: int = 1

    def __post_init__(self) -> None:
        clean: dict[str, object] = {
            name: whole(name, getattr(self, name), maximum=LARGEST_DEGREE)
            for name in ("dp", "tp", "pp", "microbatch_size", "num_virtual_stages", "hybrid")
        }
        clean["zero_stage"] = whole("zero_stage", self.zero_stage, minimum=0, maximum=3)
        given: object = self.num_microbatches
        pp = cast(int, clean["pp"])
        chosen = min(_default_num_microbatches(pp), LARGEST_DEGREE) if given is None else given
        clean["num_microbatches"] = whole("num_microbatches", chosen, maximum=LARGEST_DEGREE)
        clean["schedule"] = choice("schedule", self.schedule, SCHEDULES)
        clean["precision"] = choice("precision", self.precision, PRECISIONS)
        clean["recompute"] = choice("recompute", self.recompute, RECOMPUTES)
        clean["offload"] = choice("offload", self.offload, OFFLOADS)
        clean["engine"] = choice("engine", self.engine, ENGINES)
        clean["sequence_parallel"] = flag("sequence_parallel", self.sequence_parallel)
        if self.reshard_after_forward is not None:
            clean["reshard_after_forward"] = flag("reshard_after_forward", self.reshard_after_forward)
        for name, value in clean.items():
            object.__setattr__(self, name, value)

    @property
    def world_size(self) -> int:
        """Ranks that the layout takes.

        >>> Layout(dp=2, tp=2, pp=2).world_size
        8
        """
        return self.dp * self.tp * self.pp

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline.

        >>> Layout(pp=4, schedule="interleaved", num_virtual_stages=2).num_stages
        8
        """
        return self.pp * self.num_virtual_stages

    @property
    def global_batch_size(self) -> int:
        """Samples of a step over all dp ranks.

        >>> Layout(dp=2, num_microbatches=4, microbatch_size=3).global_batch_size
        24
        """
        return self.microbatch_size * self.num_microbatches * self.dp

    @property
    def reshards(self) -> bool:
        """Whether gathered parameters are dropped after the forward: ZeRO-3 does so unless told otherwise.

        >>> Layout(dp=2, zero_stage=3).reshards, Layout(dp=2, zero_stage=2).reshards
        (True, False)
        """
        return self.zero_stage == 3 if self.reshard_after_forward is None else self.reshard_after_forward

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a layout from tokens in any order, such as "dp2 pp2 zero1 1f1b m8 bf16".

        Tokens: `dpN tpN ppN`, `zeroN`, a schedule's name, `vN` (virtual stages), `mN` (micro-batches), `bN`
        (micro-batch size), `fp32 | bf16 | fp8`, `sp`, `recompute:selective | recompute:full`,
        `offload:optimizer | offload:all`, `torch | deepspeed`, `reshard | no_reshard`, `hybridN`.
        `str(layout)` is the inverse.

        Raises:
            PlanError: no text, an unknown token (with the nearest known one), or a field set twice.

        >>> Layout.parse("bf16 pp2 dp2") == Layout(dp=2, pp=2, precision="bf16")
        True
        >>> Layout.parse("dp2 tp2 tp4")
        Traceback (most recent call last):
            ...
        labkit.errors.PlanError: 'tp2' and 'tp4' both set tp: a layout sets each field once. Keep one of them.
        """
        given: object = text
        if not isinstance(given, str):
            raise PlanError(f"layout {shown(text)} is not text: write tokens such as 'dp2 pp2 m8'.")
        fields: dict[str, object] = {}
        source: dict[str, str] = {}
        for token in text.split():
            name, value = _read_token(token)
            if name in fields:
                raise PlanError(
                    f"{shown(source[name])} and {shown(token)} both set {name}: a layout sets each field once. "
                    f"Keep one of them."
                )
            fields[name] = value
            source[name] = token
        if not fields:
            raise PlanError(f"layout {shown(text)} has no token: a layout needs at least one, such as 'dp1'.")
        return cls(**fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        counts = [("dp", self.dp, 1), ("tp", self.tp, 1), ("pp", self.pp, 1), ("zero", self.zero_stage, 0)]
        words = [_count(token, value, left_out) for token, value, left_out in counts]
        piped = self.pp > 1
        words.append(self.schedule if piped or self.schedule != SCHEDULES[0] else "")
        words.append(_count("v", self.num_virtual_stages, 1))
        words.append(_count("m", self.num_microbatches, 0 if piped else 1))
        words.append(_count("b", self.microbatch_size, 1))
        words.append(self.precision if self.precision != "fp32" else "")
        words.append("sp" if self.sequence_parallel else "")
        words.append(f"recompute:{self.recompute}" if self.recompute != "none" else "")
        words.append(f"offload:{self.offload}" if self.offload != "none" else "")
        words.append(self.engine if self.engine != "auto" else "")
        words.append({None: "", True: "reshard", False: "no_reshard"}[self.reshard_after_forward])
        words.append(_count("hybrid", self.hybrid, 1))
        return " ".join(word for word in words if word) or "dp1"


def _default_num_microbatches(pp: int) -> int:
    return 2 * pp if pp > 1 else 1


def _count(token: str, value: int, left_out: int) -> str:
    return "" if value == left_out else f"{token}{value}"


def _read_token(token: str) -> tuple[str, object]:
    if token in _WORDS:
        return _WORDS[token]
    match = re.fullmatch(r"([a-z]+)([0-9]+)", token)
    if match and match[1] in _COUNTS:
        name, digits = _COUNTS[match[1]], match[2]
        if len(digits.lstrip("0")) > 9:
            raise PlanError(f"{shown(token)} sets {name} above {LARGEST_DEGREE}: {name} ends there. Use less.")
        return name, int(digits)
    guess = _guess(token)
    hint = f"Did you mean {guess!r}?" if guess else "Example: 'dp2 tp2 pp2 1f1b m8 bf16'."
    if "," in token:
        hint = "Put a space where the comma is."
    elif re.fullmatch(rf"((?:{'|'.join(_COUNTS)})[0-9]+)+", token):
        hint = f"Put a space between tokens: {' '.join(re.findall('[a-z]+[0-9]+', token[:60]))!r}."
    raise PlanError(
        f"{shown(token)} is not a layout token: tokens are dpN, tpN, ppN, zeroN, vN, mN, bN, hybridN and "
        f"{', '.join(_WORDS)}, with spaces between. {hint}"
    )


# What people call a thing elsewhere, where spelling leads to another.
_OTHER_WORDS = {"fp16": "bf16", "fsdp": "zero3", "fsdp2": "zero3", "ddp": "dp2", "hsdp": "hybrid2", "pipeline": "pp2"}


def _guess(token: str) -> str | None:
    """The token that was likely meant: same letters in another order first, then the nearest."""
    lower = re.sub(r"[=:_-](?=[0-9])", "", token[:60].lower())
    if lower in _OTHER_WORDS:
        return _OTHER_WORDS[lower]
    digits = re.search(r"[0-9]{1,6}$", lower)
    counts = [f"{name}{digits[0] if digits else 2}" for name in _COUNTS]
    swapped = [name for name in counts if sorted(name) == sorted(lower)]
    return swapped[0] if swapped else nearest(lower, [*counts, *_WORDS])
