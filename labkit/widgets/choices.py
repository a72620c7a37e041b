"""Which layouts exist for some ranks and a model, and which of them is nearest to a wish: the logic of the controls.

`plan.build` alone decides what exists, and says why something does not; this module knows no rule of its own beyond
arithmetic on degrees.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from math import log2
from typing import Any

from labkit import plan as planning
from labkit.errors import PlanError
from labkit.schedule import INTERLEAVED, V_SHAPED
from labkit.spec import Layout, Model
from labkit.spec.layout import ENGINES, OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES

Numbers = tuple[int, int, int, int, int]

NUMBERS = ("dp", "tp", "pp", "num_microbatches", "num_virtual_stages")
DEGREES = NUMBERS[:3]
# Where two of these do not go together, the later one stays.
WORDS: dict[str, tuple[Any, ...]] = {
    "engine": ENGINES,
    "schedule": tuple(name for name in SCHEDULES if name != "own"),
    "offload": OFFLOADS,
    "recompute": RECOMPUTES,
    "sequence_parallel": (False, True),
    "zero_stage": (0, 1, 2, 3),
    "precision": PRECISIONS,
}
AXES = (*NUMBERS, *WORDS)
# Neighbours of these are more alike.
ORDERED = ("zero_stage", "precision")

SAMPLES_PER_RANK = 4
MOST_VIRTUAL_STAGES = 8
# Where to look for the layout nearest to a wish: how many words change, and which numbers do not.
SEARCH: tuple[tuple[int, tuple[str, ...]], ...] = ((0, DEGREES), (1, DEGREES), (0, ()), (1, ()), (2, DEGREES), (2, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A wish that no layout fulfils.

    Attributes:
        wish: what was wanted.
        reason: why it does not exist, as `plan.build` says it.
        nearest: a layout that exists.
    """

    wish: Layout
    reason: str
    nearest: Layout


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
            if any(choices._plain()):
                return choices
        raise PlanError(f"no layout of 1 to {num_ranks} ranks trains a global batch of {batch}: use {num_ranks * 4}.")

    def values(self, axis: str) -> list[Any]:
        """What the control of an axis offers, in order: numbers that some layout has, and every word there is."""
        if axis in WORDS:
            return list(WORDS[axis])
        if axis == "num_virtual_stages":
            splits = (replace(layout, schedule=INTERLEAVED[0]) for layout in self._plain() if layout.pp > 1)
            most = max((self.model.num_layers // layout.pp for layout in splits), default=1)
            return list(range(1, min(most, MOST_VIRTUAL_STAGES) + 1))
        return sorted({getattr(layout, axis) for layout in self._plain()})

    def follow(self, wish: Layout, moved: str) -> Layout | Refusal:
        """What a wish becomes when a hand moved one control.

        The moved axis stays where it was put. Numbers follow, so that all ranks have work and the batch is whole:
        all of them when a number was moved, else micro-batches and stages per rank. Words do not follow.
        """
        wish = _with_fitting_stages(wish, moved)
        ordered = self._ordered(wish, moved, fixed=() if moved in NUMBERS else DEGREES)
        for numbers in ordered:
            if layout := self._existing(wish, numbers, {}):
                return layout
        impossible = self._layout(wish, ordered[0], {}) if ordered else wish
        return Refusal(wish=impossible, reason=_why_not(self.model, impossible), nearest=self.nearest(wish, moved))

    def nearest(self, wish: Layout, moved: str | None = None) -> Layout:
        """The layout closest to a wish: with the same degrees and one word changed, then with other degrees, ...

        Args:
            wish: what is wanted, possible or not; its micro-batch size is ignored, since the global batch is fixed.
            moved: the axis a hand just moved: it is kept if it can be.
        """
        kept = [moved, None] if moved else [None]
        for axis in kept:
            for num_changed, fixed in SEARCH:
                if found := self._closest(wish, axis, num_changed, fixed):
                    return found
        return next(self._plain())

    def _closest(self, wish: Layout, kept: str | None, num_changed: int, fixed: Sequence[str]) -> Layout | None:
        """The closest layout with so many words changed."""
        numbers = self._ordered(wish, kept, fixed)
        ranked = sorted(
            (rank, cost, place, words)
            for rank, place in enumerate(numbers)
            for cost, words in _changes(wish, kept, num_changed)
        )
        return next(
            (found for _, _, place, words in ranked if (found := self._existing(wish, place, dict(words)))), None
        )

    def _ordered(self, wish: Layout, kept: str | None, fixed: Sequence[str]) -> list[Numbers]:
        """The numbers a layout may have, nearest to the wish first."""
        held = {axis: getattr(wish, axis) for axis in (*fixed, *([kept] if kept in NUMBERS else []))}
        found = [
            numbers
            for numbers in _numbers(self.num_ranks, self.global_batch_size, self.model.num_layers)
            if all(dict(zip(NUMBERS, numbers, strict=True))[axis] == value for axis, value in held.items())
        ]
        return sorted(found, key=lambda numbers: _distance(numbers, wish))

    def _layout(self, wish: Layout, numbers: Numbers, words: dict[str, Any]) -> Layout:
        fields = dict(zip(NUMBERS, numbers, strict=True)) | words
        size = self.global_batch_size // fields["dp"] // fields["num_microbatches"]
        return replace(wish, **fields, microbatch_size=size)

    def _existing(self, wish: Layout, numbers: Numbers, words: dict[str, Any]) -> Layout | None:
        layout = self._layout(wish, numbers, words)
        return None if _why_not(self.model, layout) else layout

    def _plain(self) -> Iterator[Layout]:
        """Layouts that say nothing but degrees and micro-batches."""
        for numbers in _numbers(self.num_ranks, self.global_batch_size, 1):
            if layout := self._existing(Layout(), numbers, {}):
                yield layout


def _with_fitting_stages(wish: Layout, moved: str) -> Layout:
    """A schedule that was chosen brings the stages per rank that it needs."""
    if moved != "schedule":
        return wish
    if wish.schedule in V_SHAPED:
        return replace(wish, num_virtual_stages=2)
    return replace(wish, num_virtual_stages=max(2, wish.num_virtual_stages) if wish.schedule in INTERLEAVED else 1)


@lru_cache(maxsize=64)
def _numbers(num_ranks: int, global_batch_size: int, num_layers: int) -> tuple[Numbers, ...]:
    """Degrees that multiply to the ranks, micro-batches that divide the batch, stages that layers suffice for."""
    return tuple(
        (dp, tp, pp, num_microbatches, num_virtual_stages)
        for dp, tp, pp in _degrees(num_ranks)
        if global_batch_size % dp == 0
        for num_microbatches in _divisors(global_batch_size // dp)
        for num_virtual_stages in range(1, max(1, min(num_layers // pp, MOST_VIRTUAL_STAGES)) + 1)
    )


def _degrees(num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Every dp, tp and pp whose product is the number of ranks."""
    for dp in _divisors(num_ranks):
        for tp in _divisors(num_ranks // dp):
            yield dp, tp, num_ranks // dp // tp


def _distance(numbers: Numbers, wish: Layout) -> tuple[float, ...]:
    """How far numbers are from a wish, most important first: the degrees, micro-batches, stages."""
    away = [abs(log2(value / getattr(wish, axis))) for axis, value in zip(NUMBERS, numbers, strict=True)]
    return (sum(away[:3]), *away[3:], numbers[1])


def _changes(wish: Layout, kept: str | None, num_changed: int) -> Iterator[tuple[int, tuple[tuple[str, Any], ...]]]:
    """Every way to change so many words, and what it costs: the least for what says least."""
    free = [axis for axis in WORDS if axis != kept]
    for changed in combinations(free, num_changed):
        others = [[value for value in WORDS[axis] if value != getattr(wish, axis)] for axis in changed]
        for values in product(*others):
            words = tuple(zip(changed, values, strict=True))
            yield sum(_cost(wish, axis, value) for axis, value in words), words


def _cost(wish: Layout, axis: str, value: Any) -> int:
    steps = WORDS[axis].index(value)
    if axis in ORDERED:
        steps = abs(steps - WORDS[axis].index(getattr(wish, axis)))
    return 100 * list(WORDS).index(axis) + steps


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@lru_cache(maxsize=65536)
def _why_not(model: Model, layout: Layout) -> str:
    """Why a layout does not exist; "" where it does."""
    try:
        planning.build(model, layout)
    except PlanError as error:
        return str(error)
    return ""
