"""What was seen when an answer was tried on ranks, as plain data that may come from a process nobody trusts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from labkit.errors import PlanError, listed

__all__ = ["Observation", "Outcome", "Wait"]

Outcome = Literal["returned", "raised", "timeout", "lost", "unsolved", "missing", "skipped"]
MAX_TEXT = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Where a rank was when the time was over.

    Attributes:
        rank: the rank.
        doing: what it did, such as "waits in recv".
        where: the line of the answer, such as "Cell In[3], line 7"; "" where none of its lines is on the stack.
    """

    rank: int
    doing: str
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """How one case ended.

    Attributes:
        outcome: "returned" (every member returned), "raised" (the answer raised), "timeout" (cut off), "lost" (a rank's
            process ended), "unsolved" (NotImplementedError: the stub is still there), "missing" (no such function),
            "skipped" (not tried any more, after others hung or crashed).
        values: what the trial returned on each member, in group order.
        message: what was raised, or how ranks ended, in words.
        where: the line of the answer that raised.
        waits: at a timeout, where each rank was.
        seconds: how long the case took.
    """

    outcome: Outcome
    values: tuple[Any, ...] = ()
    message: str = ""
    where: str = ""
    waits: tuple[Wait, ...] = ()
    seconds: float = 0.0

    @classmethod
    def missing(cls, names: Sequence[str], more: str = "") -> "Observation":
        """What is seen of an answer that lacks functions.

        >>> Observation.missing(["f", "g"], ": run their cells").message
        'f and g are not defined: run their cells.'
        """
        return cls(
            outcome="missing", message=f"{listed(names)} {'is' if len(names) == 1 else 'are'} not defined{more}."
        )

    def to_plain(self) -> dict[str, Any]:
        """A form that JSON can carry."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> "Observation":
        """Read what a process nobody trusts has written; texts are cut, unknown fields are refused.

        Raises:
            PlanError: it has not the form of an observation.
        """
        if not isinstance(plain, Mapping) or set(plain) - set(cls.__slots__):
            raise PlanError("what came back is not an observation.")
        outcome = plain.get("outcome")
        if outcome not in get_args(Outcome):
            raise PlanError(f"what came back has the outcome {str(outcome)[:40]!r}, which does not exist.")
        waits = plain.get("waits", ())
        values = plain.get("values", ())
        if not isinstance(waits, list | tuple) or not isinstance(values, list | tuple):
            raise PlanError("what came back has values or waits that are no list.")
        return cls(
            outcome=cast(Outcome, outcome),
            values=tuple(values),
            message=_text(plain.get("message", "")),
            where=_text(plain.get("where", "")),
            waits=tuple(_wait(one) for one in waits[:64]),
            seconds=_number(plain.get("seconds", 0.0)),
        )


def _wait(plain: Any) -> Wait:
    if not isinstance(plain, Mapping) or type(plain.get("rank")) is not int:
        raise PlanError("what came back names a waiting rank that is none.")
    return Wait(rank=plain["rank"], doing=_text(plain.get("doing", "")), where=_text(plain.get("where", "")))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise PlanError(f"what came back has a {type(value).__name__} where a text belongs.")
    return value[:MAX_TEXT]


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise PlanError("what came back has no number of seconds.")
    return float(value)
