"""Clocks of several ranks on one axis: offsets taken at both ends of a run, straight lines between.

Every host has its own monotonic clock, with its own zero and its own drift. An offset measured before the run
removes the zero, a second one after it removes the drift, so nothing has to be exchanged while ranks train.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from labkit.errors import LabError

__all__ = ["Alignment", "HasClocks", "Offsets", "sample_offsets"]

# Clocks of two hosts differ by when they booted, seconds to days; what differs by less than a loaded round trip is one
# clock, and reading it exactly keeps a receive after its send.
SAME_CLOCK_S = 0.02
# Two samples closer than this say nothing about drift: their own error is larger.
MIN_SPAN_S = 1.0


class HasClocks(Protocol):
    """What alignment needs of live ranks."""

    def clock_offsets(self) -> Mapping[int, float]:
        """Seconds to add to each rank's monotonic clock to get this process's."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """The offsets of every rank at one moment.

    Attributes:
        at_s: the moment, on this process's monotonic clock.
        offset_s: seconds to add to a rank's clock to get this process's, by rank.
    """

    at_s: float
    offset_s: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """How to read each rank's clock: by offsets at the start, at the end, or both.

    With both, a rank's offset changes linearly from the first to the second and beyond; with one it is constant;
    a rank without any keeps its own clock and `aligned` says so.

    >>> start, end = Offsets(at_s=10.0, offset_s={1: 5.0}), Offsets(at_s=20.0, offset_s={1: 5.5})
    >>> Alignment(start=start, end=end).line(1)      # at its 5.0 s add 5.0, at its 14.5 s add 5.5
    (5.0, 5.0, 0.05263157894736842)
    """

    start: Offsets | None
    end: Offsets | None

    def line(self, rank: int) -> tuple[float, float, float]:
        """The rank's offset as a line `(at, offset, drift)`: `local = t + offset + drift * (t - at)`."""
        known = [o for o in (self.start, self.end) if o is not None and rank in o.offset_s]
        if not known:
            return (0.0, 0.0, 0.0)
        first, last = known[0], known[-1]
        at = first.at_s - first.offset_s[rank]
        span = (last.at_s - last.offset_s[rank]) - at
        if span < MIN_SPAN_S:
            # Short runs: the better of two readings is their mean, and drift within a second is nothing.
            return (at, (first.offset_s[rank] + last.offset_s[rank]) / 2, 0.0)
        return (at, first.offset_s[rank], (last.offset_s[rank] - first.offset_s[rank]) / span)

    def local_s(self, rank: int, time_s: float) -> float:
        """A moment on a rank's clock, in seconds of this process's monotonic clock."""
        at, offset, drift = self.line(rank)
        return time_s + offset + drift * (time_s - at)

    def covers(self, ranks: frozenset[int]) -> bool:
        """Whether every one of these ranks had at least one offset: whether their events may be compared."""
        return all(any(o is not None and rank in o.offset_s for o in (self.start, self.end)) for rank in ranks)


def sample_offsets(ranks: HasClocks) -> Offsets | None:
    """Ask every rank for its clock; None when that cannot be had (ranks died, agents gone)."""
    try:
        read = ranks.clock_offsets()
    except (LabError, OSError):
        return None
    offsets = {rank: 0.0 if abs(offset) < SAME_CLOCK_S else offset for rank, offset in read.items()}
    return Offsets(at_s=time.monotonic(), offset_s=offsets) if offsets else None
