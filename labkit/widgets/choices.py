"""Which layouts exist for some ranks and a model, and which of them is nearest to a wish: the logic of the sliders.

`plan.build` alone decides what exists; this module knows no rule of its own beyond arithmetic on degrees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import log2

from labkit import plan as planning
from labkit.errors import PlanError
from labkit.schedule import INTERLEAVED, V_SHAPED
from labkit.spec import Layout, Model

AXES = ("dp", "tp", "pp", "num_microbatches", "schedule", "precision")
ONE_STAGE = ("1f1b", "gpipe")
SCHEDULES = (*ONE_STAGE, *INTERLEAVED, *V_SHAPED)
PRECISIONS = ("fp32", "bf16")
SAMPLES_PER_RANK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Every layout that keeps all ranks busy with one global batch.

    Attributes:
        model: what is trained.
        num_ranks: ranks that every layout uses: as many of those that are up as any layout can use.
        global_batch_size: samples of a step, the same in every layout, so that losses compare.
    """

    model: Model
    num_ranks: int
    global_batch_size: int

    @classmethod
    def of(cls, num_ranks: int, model: Model, global_batch_size: int | None = None) -> "Choices":
        """The choices on so many ranks; four samples a rank unless said otherwise.

        Raises:
            PlanError: no rank, or a batch that no layout can hold.
        """
        if num_ranks < 1:
            raise PlanError(f"num_ranks={num_ranks} is below 1: a layout needs a rank. Start one.")
        batch = SAMPLES_PER_RANK * num_ranks if global_batch_size is None else global_batch_size
        for used in range(num_ranks, 0, -1):
            choices = cls(model=model, num_ranks=used, global_batch_size=batch)
            if any(_exists(model, layout) for layout in choices._candidates()):
                return choices
        raise PlanError(f"no layout of 1 to {num_ranks} ranks trains a global batch of {batch}: use {num_ranks * 4}.")

    def values(self, axis: str) -> list[int] | list[str]:
        """What this axis takes in any layout that exists, in order; for a slider's scale."""
        fields = {getattr(layout, axis) for layout in self._candidates() if _exists(self.model, layout)}
        order = {"schedule": SCHEDULES, "precision": PRECISIONS}.get(axis)
        return [name for name in order if name in fields] if order else sorted(fields)

    def nearest(self, wish: Layout, moved: str | None = None) -> Layout:
        """The layout closest to a wish.

        Args:
            wish: what is wanted, possible or not; its micro-batch size is ignored, since the global batch is fixed.
            moved: the axis a hand just moved: it is kept if it can be, and the others follow.
        """
        ordered = sorted(self._candidates(), key=lambda layout: _distance(layout, wish, moved))
        return next(layout for layout in ordered if _exists(self.model, layout))

    def _candidates(self) -> tuple[Layout, ...]:
        return _candidates(self.num_ranks, self.global_batch_size)


@lru_cache(maxsize=64)
def _candidates(num_ranks: int, global_batch_size: int) -> tuple[Layout, ...]:
    """Every combination whose degrees multiply to the ranks and whose micro-batches divide the batch.

    Schedules of several stages per rank get two: more stages come with fewer layers each, which few models have.
    """
    return tuple(
        Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            num_microbatches=num_microbatches,
            microbatch_size=global_batch_size // dp // num_microbatches,
            schedule=schedule,
            num_virtual_stages=1 if schedule in ONE_STAGE else 2,
            precision=precision,
        )
        for dp, tp, pp in _degrees(num_ranks)
        if global_batch_size % dp == 0
        for num_microbatches in _divisors(global_batch_size // dp)
        for schedule in (SCHEDULES if pp > 1 else ONE_STAGE)
        for precision in PRECISIONS
    )


def _degrees(num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Every dp, tp and pp whose product is the number of ranks."""
    for dp in _divisors(num_ranks):
        for tp in _divisors(num_ranks // dp):
            yield dp, tp, num_ranks // dp // tp


def _distance(layout: Layout, wish: Layout, moved: str | None) -> tuple[float, ...]:
    """How far a layout is from a wish, most important first: the moved axis, the degrees, micro-batches, the words."""
    away = {axis: abs(log2(getattr(layout, axis)) - log2(getattr(wish, axis))) for axis in AXES[:4]}
    away |= {axis: float(getattr(layout, axis) != getattr(wish, axis)) for axis in AXES[4:]}
    kept = 0.0 if moved is None else away[moved]
    degrees = away["dp"] + away["tp"] + away["pp"]
    return (kept, degrees, away["num_microbatches"], away["schedule"], away["precision"], layout.tp)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@lru_cache(maxsize=65536)
def _exists(model: Model, layout: Layout) -> bool:
    try:
        planning.build(model, layout)
    except PlanError:
        return False
    return True
