"""How far a batch is: a value for programs, one updating line for people."""

import shutil
import sys
from dataclasses import dataclass
from typing import TextIO

__all__ = ["Bar", "Progress"]

BAR_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A batch at one moment.

    Attributes:
        num_done: how many answers have a result.  num_total: how many there are.
        num_kept: how many of the done ones were there from an earlier run.
        elapsed_s: seconds since this run began.
        running: student and question of those that run.
        finished: what has just been finished, such as "s01 06.1: full, 10 of 10"; "" when nothing has.
    """

    num_done: int
    num_total: int
    num_kept: int
    elapsed_s: float
    running: tuple[tuple[str, str], ...] = ()
    finished: str = ""

    @property
    def left_s(self) -> float | None:
        """About how long it will take, from how long this run's answers took; None before the first."""
        num_run = self.num_done - self.num_kept
        return self.elapsed_s / num_run * (self.num_total - self.num_done) if num_run else None

    def __str__(self) -> str:
        share = self.num_done / self.num_total if self.num_total else 1.0
        filled = int(BAR_WIDTH * share)
        parts = [f"{'█' * filled}{'░' * (BAR_WIDTH - filled)} {self.num_done}/{self.num_total} {share:.0%}"]
        parts.append(clock(self.elapsed_s))
        if self.left_s is not None and self.num_done < self.num_total:
            parts.append(f"about {clock(self.left_s)} left")
        if self.running:
            more = f" (and {len(self.running) - 1} more)" if len(self.running) > 1 else ""
            parts.append(f"{' '.join(self.running[0])}{more}")
        return " · ".join(parts)


def clock(seconds: float) -> str:
    """A duration as a clock shows it.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Bar:
    """Shows progress on stderr: one line that is rewritten on a terminal, a line for each result elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self.last: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        self.last = progress
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r{str(progress)[:width].ljust(width)}")
        elif progress.finished:
            share = f"{progress.num_done}/{progress.num_total}"
            self._write(f"{share} {clock(progress.elapsed_s)} {progress.finished}\n")

    def end(self) -> None:
        """Leave the line."""
        if self._terminal and self.last is not None:
            self._write("\n")

    def _write(self, text: str) -> None:
        # A terminal that cannot show a bar or a name gets a question mark in its place.
        encoding = self._stream.encoding or "ascii"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()
