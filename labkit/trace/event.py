"""One thing that a rank did, predicted or measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from labkit.errors import LabError
from labkit.schedule import COMMUNICATION, COMPUTE
from labkit.spec.checks import shown

__all__ = ["COLLECTIVES", "KINDS", "OTHERS", "Event"]

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
OTHERS = ("optimizer", "memory", "step", "wait")

KINDS = COMPUTE + COMMUNICATION + COLLECTIVES + OTHERS
"""Known kinds. "memory" holds `num_bytes` at `start_s` (no duration); "step" is a rank's whole step."""

_WHOLE = ("step", "stage", "microbatch", "seq", "num_bytes", "peer")


@dataclass(frozen=True, slots=True)
class Event:
    """What one rank did from `start_s` for `duration_s` seconds.

    Attributes:
        rank: who.
        kind: one of `KINDS`, or another word.
        start_s: seconds on the trace's clock.
        duration_s: seconds.
        step: training step.
        stage: pipeline stage.
        microbatch: micro-batch.
        group: axis or name of the process group, for collectives.
        seq: the collective's number within its group.
        num_bytes: bytes sent, or held (memory).
        peer: the other rank of a send or receive.

    Raises:
        LabError: a field of the wrong type, a time that is not finite, or a negative duration.

    >>> event = Event(0, "F", 1.0, 0.5, step=0, stage=0, microbatch=2)
    >>> event.end_s, event.label
    (1.5, '0F2')
    """

    rank: int
    kind: str
    start_s: float
    duration_s: float
    step: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    group: str | None = None
    seq: int | None = None
    num_bytes: int | None = None
    peer: int | None = None

    def __post_init__(self) -> None:
        try:
            fits = (
                type(self.rank) is int
                and self.rank >= 0
                and bool(self.kind)
                and math.isfinite(self.start_s)
                and 0 <= self.duration_s < math.inf
            )
        except (TypeError, OverflowError):
            fits = False
        if not fits or not isinstance(self.kind, str):
            raise LabError(
                f"event rank={shown(self.rank)} kind={shown(self.kind)} start_s={shown(self.start_s)} "
                f"duration_s={shown(self.duration_s)} is none: a rank of 0 or more does a named thing at a finite time "
                f"for 0 or more seconds."
            )

    @property
    def end_s(self) -> float:
        """Seconds at which it was over."""
        return self.start_s + self.duration_s

    @property
    def label(self) -> str:
        """The action's text, such as `2F0`, or the kind where there is no stage and micro-batch."""
        if self.stage is None or self.microbatch is None:
            return self.kind
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def from_row(cls, rank: int, row: Sequence[object]) -> Self:
        """Read `[kind, start_s, duration_s, step, stage, microbatch, group, seq, num_bytes, peer]`, as ranks report.

        Missing fields at the end are None.

        Raises:
            LabError: too few or too many fields, or one of the wrong type.

        >>> Event.from_row(1, ["F", 0.0, 0.5, 3]).step
        3
        """
        given: object = row
        if not isinstance(given, list | tuple) or not 3 <= len(given) <= 10:
            raise LabError(f"event row {shown(row)} of rank {shown(rank)} is none: a row has 3 to 10 fields.")
        event = cls(rank, *row)  # type: ignore[arg-type]
        for name in _WHOLE:
            value = getattr(event, name)
            if value is not None and type(value) is not int:
                raise LabError(
                    f"event {name}={shown(value)} of rank {rank} is {type(value).__name__}: {name} is an int."
                )
        if event.group is not None and not isinstance(event.group, str):
            raise LabError(f"event group={shown(event.group)} of rank {rank} is no text: group names a process group.")
        return event

    def to_row(self) -> list[object]:
        """Return the row that `from_row` reads, without Nones at the end.

        >>> Event(1, "F", 0.0, 0.5, step=3).to_row()
        ['F', 0.0, 0.5, 3]
        """
        row: list[object] = [self.kind, self.start_s, self.duration_s, self.step, self.stage, self.microbatch]
        row += [self.group, self.seq, self.num_bytes, self.peer]
        while row[-1] is None:
            row.pop()
        return row
