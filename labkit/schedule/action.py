"""One action of a pipeline schedule, and its text form."""

import re
from dataclasses import dataclass

from labkit.errors import PlanError
from labkit.spec.checks import choice, shown, whole

__all__ = ["COMMUNICATION", "COMPUTE", "KINDS", "Action", "format_actions", "parse", "parse_actions"]

COMPUTE = ("F", "B", "I", "W")
"""Forward, whole backward, backward of the input, backward of the weights."""

COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""Outputs go from stage s to s + 1 (`F`), gradients from s to s - 1 (`B`); the stage named is the one that acts."""

KINDS = COMPUTE + COMMUNICATION

_TEXT = re.compile(rf"([0-9]{{1,9}})({'|'.join(sorted(KINDS, key=len, reverse=True))})([0-9]{{1,9}})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """What a rank does with one micro-batch at one stage.

    The text form is torch's own: stage, kind, micro-batch.

    Raises:
        PlanError: a negative or non-integer number, or an unknown kind.

    >>> str(Action(stage=2, kind="F", microbatch=0))
    '2F0'
    """

    stage: int
    kind: str
    microbatch: int

    def __post_init__(self) -> None:
        plain = type(self.stage) is int and type(self.microbatch) is int
        if plain and self.stage >= 0 and self.microbatch >= 0 and self.kind in KINDS:
            return
        object.__setattr__(self, "stage", whole("stage", self.stage, minimum=0))
        object.__setattr__(self, "microbatch", whole("microbatch", self.microbatch, minimum=0))
        choice("kind", self.kind, KINDS)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse(text: str) -> Action:
    """Read one action; `str(action)` is the inverse.

    Raises:
        PlanError: the text is no action.

    >>> parse("3SEND_F1")
    Action(stage=3, kind='SEND_F', microbatch=1)
    """
    given: object = text
    match = _TEXT.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is None:
        raise PlanError(
            f"{shown(text)} is not an action: an action is stage, kind and micro-batch, such as '2F0' or '3SEND_F1', "
            f"with kinds {', '.join(KINDS)}."
        )
    return Action(int(match[1]), match[2], int(match[3]))


def parse_actions(text: str) -> list[list[Action]]:
    """Read a schedule: one line per rank, actions separated by spaces or commas.

    Raises:
        PlanError: something in it is no action.

    >>> [len(actions) for actions in parse_actions('''
    ... 0F0 0F1 0B0 0B1
    ... 1F0 1B0 1F1 1B1
    ... ''')]
    [4, 4]
    """
    given: object = text
    if not isinstance(given, str):
        raise PlanError(f"schedule {shown(text)} is not text: write one line of actions per rank.")
    lines = [line for line in text.splitlines() if line.strip()]
    return [[parse(word) for word in line.replace(",", " ").split()] for line in lines]


def format_actions(actions: list[list[Action]]) -> str:
    """Write a schedule, one line per rank; the inverse of `parse_actions`.

    >>> print(format_actions([[Action(0, "F", 0), Action(0, "B", 0)]]))
    0F0 0B0
    """
    return "\n".join(" ".join(str(action) for action in line) for line in actions)
