"""What a rank prints, held to an amount that a notebook can show."""

import threading
import time
from typing import Any

from ipykernel.iostream import OutStream

MAX_BYTES_PER_CALL = 64 << 10
# A line that is drawn over itself (a progress bar) is passed on so often; its last state always is.
REDRAW_S = 0.5

_streams: list["RankStream"] = []


class RankStream(OutStream):
    """A rank's stdout or stderr: the first 64 KiB of each call pass, the rest is counted and said once."""

    def __init__(self, session: Any, pub_thread: Any, name: str, **kwargs: Any) -> None:
        # File descriptors 1 and 2 go to the rank's log file: what libraries write there is not the learner's output.
        super().__init__(session, pub_thread, name, watchfd=False, **kwargs)
        self._lock = threading.RLock()
        self._left = MAX_BYTES_PER_CALL
        self._num_dropped = 0
        self._redrawn = ""
        self._next_redraw_s = 0.0
        self.printed = False
        _streams.append(self)

    def write(self, string: str) -> int | None:  # type: ignore[override]
        """Pass text on while the call's allowance lasts."""
        if not isinstance(string, str):
            return super().write(string)  # raises the error that a text stream raises
        with self._lock:
            self.printed = True
            # A bare \r begins to draw the line again. What came of it so far is held, and replaced by the next state.
            head, mark, tail = string.rpartition("\r")
            if mark and not tail.startswith("\n"):
                self._redraw(head.rpartition("\n")[0] + "\n" if "\n" in head else "", "\r" + tail)
            elif self._redrawn:
                self._redraw("", self._redrawn + string)
            else:
                self._pass(string)
        return len(string)

    def close(self) -> None:
        """Only write what is left: the stream belongs to the rank, and the next call prints to it."""
        self.flush()

    def begin_call(self) -> None:
        """A call begins: it has the whole allowance."""
        with self._lock:
            self._left = MAX_BYTES_PER_CALL
            self._num_dropped = 0
            self._redrawn = ""
            self._next_redraw_s = 0.0
            self.printed = False

    def end_call(self) -> None:
        """Say what was left out, if anything was."""
        with self._lock:
            redrawn, self._redrawn = self._redrawn, ""
            if redrawn:
                self._emit(redrawn)
            if self._num_dropped:
                dropped, self._num_dropped = self._num_dropped, 0
                shown = MAX_BYTES_PER_CALL >> 10
                self._emit(f"\n[{_amount(dropped)} more not shown: at most {shown} KiB a call are]\n")

    def _redraw(self, before: str, line: str) -> None:
        """Hold a line that is drawn over itself; pass its state on now and then, and when it is complete."""
        if before:
            self._pass(self._redrawn + before)
        self._redrawn = line
        done = "\n" in line
        now = time.monotonic()
        if done or now >= self._next_redraw_s or len(line) > MAX_BYTES_PER_CALL:
            self._next_redraw_s = now + REDRAW_S
            self._redrawn = ""
            if done:
                self._pass(line)
            else:
                self._emit(line[:MAX_BYTES_PER_CALL])

    def _pass(self, string: str) -> None:
        if self._left <= 0:
            self._num_dropped += len(string)
            return
        if len(string) > self._left:
            self._num_dropped += len(string) - self._left
            string = string[: self._left]
        self._left -= len(string)
        self._emit(string)

    def _emit(self, string: str) -> None:
        # Half a surrogate pair (bytes decoded in a hurry) cannot travel.
        super().write(string.encode("utf-8", "backslashreplace").decode("utf-8"))


def _amount(num_chars: int) -> str:
    return f"{num_chars / 1e6:.1f} MB" if num_chars >= 1e5 else f"{num_chars} characters"


def begin_call() -> None:
    """Give both streams a new allowance."""
    for stream in _streams:
        stream.begin_call()


def end_call() -> bool:
    """Close both streams' account of the call; returns whether anything was printed."""
    for stream in _streams:
        stream.end_call()
    return any(stream.printed for stream in _streams)
