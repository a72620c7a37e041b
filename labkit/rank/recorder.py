"""What a rank did and when: rows that become events on the notebook's side.

A row is `(kind, start_s, duration_s, step, stage, microbatch, group, seq, num_bytes, peer)` with `start_s` on this
host's monotonic clock. Recording appends tuples; on a GPU it also marks the stream, and the marks become seconds once
the step is over, so that nothing waits in between.
"""

import os
import resource
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from labkit.spec import Pace

_Mark = Any  # seconds on a CPU, a CUDA event on a GPU
Row = tuple[Any, ...]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Recorder:
    """Records one rank's actions, and holds forwards and backwards to a declared pace.

    Attributes:
        on: whether anything is recorded.
        pace: declared durations, or None.
        step: the step under way.
        stage: the stage under way; between two actions this rank's stage, None where it holds several.
        microbatch: the micro-batch under way, None between them.
    """

    def __init__(self, device: torch.device, stage: int | None) -> None:
        self.on = False
        self.pace: Pace | None = None
        self.step = 0
        self.stage = self._only_stage = stage
        self.microbatch: int | None = None
        self._is_cuda = device.type == "cuda"
        self._rows: list[Row] = []
        self._num_collectives: Counter[str] = Counter()
        self._anchor: tuple[float, Any] | None = None
        self._statm: int | None = None

    def open(self, *, on: bool, pace: Pace | None) -> None:
        """Start recording for a run; sequence numbers of collectives count from here."""
        self.on, self.pace = on, pace
        self._num_collectives.clear()
        if on and not self._is_cuda and self._statm is None and os.path.exists("/proc/self/statm"):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Drop what was not sent and what is held open."""
        self.on = False
        self._rows = []
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None

    def mark(self) -> _Mark:
        """The time now, on the CPU's clock or in the GPU's stream."""
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(
        self,
        kind: str,
        start: _Mark,
        *,
        stage: int | None = None,
        microbatch: int | None = None,
        group: str | None = None,
        num_bytes: int | None = None,
        peer: int | None = None,
    ) -> None:
        """Record an action that began at `start` and ends now; of the stage under way unless said otherwise."""
        if not self.on:
            return
        seq = None
        if group is not None and peer is None:
            seq = self._num_collectives[group]
            self._num_collectives[group] += 1
        stage = self.stage if stage is None else stage
        row = (kind, start, self.mark(), self.step, stage, microbatch, group, seq, num_bytes, peer)
        self._rows.append(row)

    def begin(self, microbatch: int, stage: int | None = None) -> _Mark:
        """Begin a forward or backward, of `stage` where this rank holds several."""
        self.microbatch = microbatch
        if stage is not None:
            self.stage = stage
        return self.mark() if self.on or self.pace else None

    def end(self, kind: str, start: _Mark) -> None:
        """End a forward ("F") or backward ("B", or its halves "I" and "W"): sleep to the declared pace, record it."""
        if self.pace is not None and self.stage is not None:
            self._sleep_until(start, self.pace.seconds(kind, self.stage))
        self.add(kind, start, microbatch=self.microbatch)
        self.microbatch, self.stage = None, self._only_stage
        self.memory()

    def _sleep_until(self, start: _Mark, declared_s: float) -> None:
        if self._is_cuda:
            now = self.mark()
            now.synchronize()
            rest_s = declared_s - start.elapsed_time(now) / 1000
        else:
            rest_s = declared_s - (time.monotonic() - start)
        if rest_s > 0:
            time.sleep(rest_s)

    def memory(self) -> None:
        """Record the bytes in use now: resident set of the process, or the GPU allocator's peak since the last time."""
        if not self.on:
            return
        if self._is_cuda:
            num_bytes = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        elif self._statm is not None:
            num_bytes = int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE_BYTES
        else:
            num_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts in bytes
        mark = self.mark()
        self._rows.append(("memory", mark, mark, self.step, self.stage, None, None, None, num_bytes, None))

    def begin_step(self, step: int) -> None:
        """Begin a step."""
        self.step = step
        if self.on and self._is_cuda:
            mark = self.mark()
            mark.synchronize()
            self._anchor = (time.monotonic(), mark)

    def take(self) -> list[Row]:
        """The rows of the step that ended, ready to be sent."""
        rows, self._rows = self._rows, []
        if self._is_cuda and rows and self._anchor is not None:
            rows[-1][2].synchronize()
        return [(row[0], (start := self._seconds(row[1])), self._seconds(row[2]) - start, *row[3:]) for row in rows]

    def _seconds(self, mark: _Mark) -> float:
        if not self._is_cuda or self._anchor is None:
            return float(mark)
        anchor_s, anchor = self._anchor
        return float(anchor_s + anchor.elapsed_time(mark) / 1000)


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
