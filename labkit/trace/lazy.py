"""A trace whose totals are known at once, and whose events are made when someone asks for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.trace.event import Event
from labkit.trace.trace import Trace

__all__ = ["MOST_EVENTS", "LazyTrace", "StepTotals"]

MOST_EVENTS = 2_000_000


class StepTotals(NamedTuple):
    """What is known of a step without its events.

    Attributes:
        step_time_s: of the slowest rank.
        bubble_fraction: idle over total of the computation.
    """

    step_time_s: float
    bubble_fraction: float


class LazyTrace(Trace):
    """One predicted step of a plan: totals without events, events of one rank or of all when they are asked for.

    Equal to the `Trace` of its events.

    >>> from labkit.spec import Layout, Model
    >>> small = Plan(model=Model.preset("tiny"), layout=Layout.parse("dp2"))
    >>> events_of = lambda rank: [Event(rank, "step", 0.0, 3.0, step=0)]
    >>> trace = LazyTrace(small, StepTotals(3.0, 0.0), events_of, lambda pp_rank: 1)
    >>> trace.step_time_s, trace.num_events, trace.of_rank(1).ranks, len(trace.events)
    (3.0, 2, [1], 2)
    """

    __slots__ = ("_events_of", "_made", "_num_events_of", "_totals")

    _totals: StepTotals
    _events_of: Callable[[int], list[Event]]
    _num_events_of: Callable[[int], int]
    _made: tuple[Event, ...] | None

    def __init__(
        self,
        plan: Plan,
        totals: StepTotals,
        events_of: Callable[[int], list[Event]],
        num_events_of: Callable[[int], int],
    ) -> None:
        """Make a trace.

        Args:
            plan: what is predicted.
            totals: its totals.
            events_of: rank -> its events.
            num_events_of: pipeline rank -> how many events each of its ranks has.
        """
        for name, value in (("origin", "predicted"), ("plan", plan), ("pace", None), ("aligned", True)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_totals", totals)
        object.__setattr__(self, "_events_of", events_of)
        object.__setattr__(self, "_num_events_of", num_events_of)
        object.__setattr__(self, "_made", None)

    @property
    def events(self) -> tuple[Event, ...]:  # type: ignore[override]
        """All events of all ranks, in order of start.

        Raises:
            PlanError: more than 2,000,000: `of_rank` has those of one rank.
        """
        if self._made is None:
            if self.num_events > MOST_EVENTS:
                raise PlanError(
                    f"this step has {self.num_events} events on {self._size} ranks, and a trace holds {MOST_EVENTS}: "
                    f"folded() has those of one rank for each pipeline rank, of_rank(r) those of one."
                )
            made = Trace((event for rank in range(self._size) for event in self._events_of(rank)), "predicted")
            object.__setattr__(self, "_made", made.events)
        return self._made or ()

    @property
    def ranks(self) -> list[int]:
        """All ranks of the plan."""
        return list(range(self._size))

    @property
    def steps(self) -> list[int]:
        """The one step."""
        return [0]

    @property
    def num_events(self) -> int:
        """How many events there are, made or not."""
        pp = self.plan.layout.pp if self.plan is not None else 1
        return sum(self._num_events_of(pp_rank) for pp_rank in range(pp)) * (self._size // pp)

    @property
    def step_time_s(self) -> float:
        """Seconds of the slowest rank."""
        return float(self._totals.step_time_s)

    @property
    def bubble_fraction(self) -> float:
        """Idle over total of the computation, as `Trace` counts it."""
        return float(self._totals.bubble_fraction)

    @property
    def peak_bytes_by_rank(self) -> dict[int, int]:
        """None: `labkit.predict.memory` says it."""
        return {}

    def of_step(self, step: int) -> Trace:  # type: ignore[override]
        """Return the trace of the step: this one."""
        return self if type(step) is int and step == 0 else super().of_step(step)

    def of_rank(self, rank: int) -> Trace:  # type: ignore[override]
        """Return the trace of one rank, without making the others' events."""
        return Trace(self._events_of(rank) if rank in range(self._size) else [], "predicted", self.plan)

    def folded(self) -> Trace:
        """Return the trace of one pipeline, its ranks standing for all that do the same at the same time."""
        plan = self.plan
        firsts = [] if plan is None else [plan.rank_at(pp_rank=pp_rank) for pp_rank in range(plan.layout.pp)]
        return Trace((event for rank in firsts for event in self._events_of(rank)), "predicted", plan)

    def with_events(self, events: Any) -> Trace:  # type: ignore[override]
        """Return a trace of this plan with other events."""
        return Trace(events, "predicted", self.plan)

    @property
    def _size(self) -> int:
        return self.plan.world_size if self.plan is not None else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self._plain() == (other._plain() if isinstance(other, LazyTrace) else other)

    def __hash__(self) -> int:
        return hash(self._plain())

    def __reduce__(self) -> tuple[type[Trace], tuple[Any, ...]]:
        return Trace, (self.events, "predicted", self.plan)

    def _plain(self) -> Trace:
        return Trace(self.events, "predicted", self.plan)
