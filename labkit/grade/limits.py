"""What a question may use, and the watch that holds it to that from outside."""

import contextlib
import os
import select
import time
from dataclasses import dataclass, fields

import psutil

from labkit.errors import LabError, PlanError
from labkit.grade.sandbox import Box

__all__ = ["Exceeded", "Limits", "Watch"]

GIB = 1 << 30
LOOK_S = 0.2
# torch's threads grow with the machine.
THREADS_PER_CORE = 4
MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one question may use. Its own ranks take 9 processes, 71 threads, and half a GiB.

    Attributes:
        start_s: until its ranks are up; no answer runs before that.
        case_s: for one case.
        question_s: for all cases.
        num_processes: at once.
        num_threads: at once, and some for each core, held by the system: for what grows faster than the watch looks.
        memory_bytes: in all processes together.
        allocation_bytes: that one process may ask for, touched or not.
    """

    start_s: float = 120.0
    case_s: float = 10.0
    question_s: float = 90.0
    num_processes: int = 64
    num_threads: int = 256
    memory_bytes: int = 4 * GIB
    allocation_bytes: int = 4 * GIB

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not value > 0:
                raise PlanError(f"{one.name}={value} is no limit: it must be above 0.")

    def for_system(self, num_threads_beside: int) -> dict[str, int]:
        """What the operating system holds each process to, by the names that the arena knows."""
        return {
            "data": self.allocation_bytes,
            "fsize": MAX_FILE_BYTES,
            "nproc": self.num_threads + THREADS_PER_CORE * (os.cpu_count() or 1) + num_threads_beside,
        }


class Exceeded(LabError):
    """A question used more than it may."""


class Watch:
    """Reads lines that come out of a box, looks at what is inside while it waits, and hands in what is still unsent."""

    def __init__(self, box: Box, limits: Limits, max_line_bytes: int) -> None:
        self._box, self._limits, self._max = box, limits, max_line_bytes
        self._poll = select.poll()
        self._poll.register(box.out, select.POLLIN)
        self._pending = bytearray()
        self._next_look = 0.0
        self._num_before = 0

    def line(self, deadline: float) -> bytes | None:
        """The next line; None when there are no more.

        Raises:
            TimeoutError: the deadline (`time.monotonic`) has passed.
            Exceeded: more processes, memory or bytes than allowed.
        """
        searched = 0
        while (end := self._pending.find(b"\n", searched)) < 0:
            searched = len(self._pending)
            if searched > self._max:
                raise Exceeded(f"more than {self._max} bytes came in one line.")
            self._look()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if self._ready(min(LOOK_S, left_s)):
                data = os.read(self._box.out, 1 << 16)
                if not data:
                    return None
                self._pending += data
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return line

    def _ready(self, timeout_s: float) -> bool:
        """Wait until something came out."""
        if self._box.unsent:
            self._poll.register(self._box.into, select.POLLOUT)
        ready = self._poll.poll(1000 * timeout_s)
        if self._box.unsent:
            self._poll.unregister(self._box.into)
            self._box.tell()
        return any(descriptor == self._box.out for descriptor, _ in ready)

    def _look(self) -> None:
        if time.monotonic() < self._next_look:
            return
        inside = self._box.processes()
        self._num_before, before = len(inside), self._num_before
        most, allowed = self._limits.num_processes, self._limits.memory_bytes
        if len(inside) > most:
            raise Exceeded(f"{len(inside)} processes ran at once, and {most} are allowed: start fewer.")
        # Forked ranks share pages. Asking how much takes long while processes are being forked: that is seen next time.
        if sum(map(_resident_bytes, inside)) > allowed and len(inside) <= before:
            used = sum(map(_own_bytes, inside))
            if used > allowed:
                rule = f"{allowed / GIB:.1f} GiB are allowed: use less."
                raise Exceeded(f"{used / GIB:.1f} GiB of memory were in use on all ranks together, and {rule}")
        self._next_look = time.monotonic() + LOOK_S


def _resident_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _own_bytes(process: psutil.Process) -> int:
    """A process's pages, each divided by how many share it: exact, and slow to ask for."""
    try:
        return int(process.memory_full_info().pss)
    except (psutil.Error, AttributeError):
        return _resident_bytes(process)
