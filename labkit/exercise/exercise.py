"""An exercise as a value: what is asked, the cases that try an answer, and the judge of what they show."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import PlanError

__all__ = ["Case", "Criterion", "Exercise", "Finding", "Idea", "Measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trial of an answer. It holds inputs, never the expected result.

    Attributes:
        name: what a learner reads, such as "3 ranks, 5 numbers".
        criterion: the name of the criterion whose points it decides.
        trial: the dotted name of the function in `labkit.rank.trials` that tries the answer on each member.
        members: the ranks of the process group that the answer gets, in group order.
        inputs: plain data (JSON) for the trial; also all that the judge needs to know what to expect.
        hidden: whether it is kept for grading a class; visible cases run in the learner's notebook.
        prepare: the dotted name of a function that every rank calls before the case, in its own time; "": none. It
            loads what takes long, and does nothing the second time.
        patience: how many times the usual time the case may take.
    """

    name: str
    criterion: str
    trial: str
    members: tuple[int, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    hidden: bool = False
    prepare: str = ""
    patience: int = 1

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members) or min(self.members) < 0:
            raise PlanError(f"members={self.members} of case {self.name!r}: a group has one or more different ranks.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """Points for one thing that an answer must do; earned when every case of it passes."""

    name: str
    points: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Idea:
    """What to think about again: `first` with the first failure, `further` from the second on."""

    first: str
    further: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number that was measured beside the most that it may be.

    Attributes:
        name: what was counted, such as "messages sent by a rank".
        value: the number.  budget: the most that is allowed; None when there is no limit.
        unit: "B", "s", or "" for a count.
    """

    name: str
    value: float
    budget: float | None = None
    unit: str = ""

    @property
    def kept(self) -> bool:
        """Whether the number is within its budget."""
        return self.budget is None or self.value <= self.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the judge says of one case.

    Attributes:
        passed: whether the answer did all that the case asks.
        message: what is wrong: both numbers, the rule. Empty when passed.
        given: the input, as a learner reads it.  got: what came out.  wanted: what should have.
        idea: the key of the exercise's idea to revisit.
        measures: numbers beside their budgets.
    """

    passed: bool
    message: str = ""
    given: str = ""
    got: str = ""
    wanted: str = ""
    idea: str = ""
    measures: tuple[Measure, ...] = ()

    def __post_init__(self) -> None:
        if not self.passed and not self.message:
            raise PlanError("a finding that did not pass has no message: say what is wrong.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One question of the course.

    Attributes:
        question: its number, such as "06.1".
        title: what it is about.
        chapter: the stem of its notebook, such as "06_ring_and_tree".
        answers: the names of the functions that the learner writes.
        criteria: what gives points.
        cases: the cases for a seed, visible ones first, each kind from small to large. Another seed draws other hidden
            sizes and data; the visible ones are always the same.
        judge: says of one case whether what the members returned (in group order, plain data) is right. It may raise on
            data that has not the form which the trial gives: the case has then failed.
        ideas: ideas by key; the keys "raised", "timeout" and "lost" serve for answers that end so.
    """

    question: str
    title: str
    chapter: str
    answers: tuple[str, ...]
    criteria: tuple[Criterion, ...]
    cases: Callable[[int], tuple[Case, ...]]
    judge: Callable[[Case, tuple[Any, ...]], Finding]
    ideas: Mapping[str, Idea]

    @property
    def max_score(self) -> int:
        """All points."""
        return sum(one.points for one in self.criteria)
