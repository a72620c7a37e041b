"""What ranks report while they train, kept in bounded memory; written by the cluster's thread, read by any."""

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["MAX_EVENTS", "Record"]

# About 100 MB of rows; a step of four ranks has some hundred, so this is a thousand steps or more.
MAX_EVENTS = 200_000
# A step has 21 rows a layer.
MAX_FP8_STEPS = 1_000

Row = Sequence[Any]


class Record:
    """The step reports and event rows of one run.

    Losses and norms are kept for every step. Event rows are kept for the newest steps only: beyond `max_events`
    the oldest messages go, and `num_dropped` counts their rows.
    """

    def __init__(self, members: Sequence[int], *, first_step: int | None = 0, max_events: int = MAX_EVENTS) -> None:
        self._members = tuple(members)
        # A run that goes on counts from where the last one ended; here every run begins at 0.
        self._first_step = first_step
        self._max_events = max_events
        self._changed = threading.Condition()
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._step_s: list[float] = []
        self._batches: deque[tuple[int, int, list[Row]]] = deque()  # (number of the message, rank, rows)
        self._num_batches = 0
        self._num_rows = 0
        self._num_reports = dict.fromkeys(self._members, 0)
        self._fp8: deque[tuple[int, list[Row]]] = deque(maxlen=MAX_FP8_STEPS)
        self._num_fp8_reports = 0
        self.num_dropped = 0

    def on_step(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take a step report: `{"step", "loss", "grad_norm", "step_s"}`."""
        with self._changed:
            step = self._own(int(message["step"]))
            for values, key in ((self._losses, "loss"), (self._grad_norms, "grad_norm"), (self._step_s, "step_s")):
                values.extend([math.nan] * (step + 1 - len(values)))
                value = message.get(key)
                values[step] = math.nan if value is None else float(value)
            self._changed.notify_all()

    def on_events(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take the rows of one rank and step: `{"events": [[kind, start_s, ...], ...]}`."""
        with self._changed:
            rows = [self._rebased(row) for row in message["events"]]
            self._batches.append((self._num_batches, rank, rows))
            self._num_batches += 1
            self._num_rows += len(rows)
            if rank in self._num_reports:
                self._num_reports[rank] += 1
            while self._num_rows > self._max_events and len(self._batches) > 1:
                _, _, old = self._batches.popleft()
                self._num_rows -= len(old)
                self.num_dropped += len(old)
            self._changed.notify_all()

    def on_fp8(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take what the casts of a step did: `{"step", "rows": [[matrix, role, amax, ...], ...]}`."""
        with self._changed:
            self._fp8.append((self._own(int(message["step"])), list(message["rows"])))
            self._num_fp8_reports += 1
            self._changed.notify_all()

    def fp8(self) -> list[tuple[int, list[Row]]]:
        """The rows on casts to FP8 of the newest steps."""
        with self._changed:
            return list(self._fp8)

    def _own(self, step: int) -> int:
        """The step of this run that a rank's step is: the first that any rank reports is the first of all."""
        if self._first_step is None:
            self._first_step = step
        return max(0, step - self._first_step)

    def _rebased(self, row: Row) -> Row:
        if self._first_step == 0 or len(row) < 4 or row[3] is None:
            return row
        return [*row[:3], self._own(row[3]), *row[4:]]

    def finish(self, losses: Sequence[float], grad_norms: Sequence[float], step_s: Sequence[float]) -> None:
        """Replace what streamed in by what the ranks returned: the final word."""
        with self._changed:
            self._losses = [float(value) for value in losses]
            self._grad_norms = [float(value) for value in grad_norms]
            self._step_s = [float(value) for value in step_s]
            self._changed.notify_all()

    def wait_for_events(self, num_steps: int, timeout_s: float) -> bool:
        """Wait until every member reported the events of so many steps: results may overtake them."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(count >= num_steps for count in self._num_reports.values()), timeout_s
            )

    def wait_for_fp8(self, num_steps: int, timeout_s: float) -> bool:
        """Wait until the casts of so many steps were reported."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_fp8_reports >= num_steps, timeout_s)

    @property
    def step(self) -> int:
        """How many steps are finished."""
        with self._changed:
            return len(self._losses)

    def losses(self) -> list[float]:
        """The loss of every finished step."""
        with self._changed:
            return list(self._losses)

    def grad_norms(self) -> list[float]:
        """The global gradient norm of every finished step, before clipping."""
        with self._changed:
            return list(self._grad_norms)

    def step_s(self) -> list[float]:
        """Seconds that every finished step took."""
        with self._changed:
            return list(self._step_s)

    def newest(self) -> tuple[int, float, list[float]]:
        """Finished steps, the newest loss (nan before the first) and the seconds of all steps."""
        with self._changed:
            return len(self._losses), self._losses[-1] if self._losses else math.nan, list(self._step_s)

    def rows(self, since: int = 0) -> tuple[list[tuple[int, Row]], int]:
        """The kept rows of messages from number `since` on, and the number that the next message will have."""
        with self._changed:
            batches = list(_newer(self._batches, since))
            return [(rank, row) for rank, rows in batches for row in rows], self._num_batches


def _newer(batches: deque[tuple[int, int, list[Row]]], since: int) -> Iterator[tuple[int, list[Row]]]:
    for number, rank, rows in batches:
        if number >= since:
            yield rank, rows
