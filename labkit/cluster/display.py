"""Shows what ranks print and display, labelled by rank, in the thread that waits for them."""

import sys
import threading
from collections import deque
from typing import Any, TextIO

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data

# What one call may show in all; each rank has its own, smaller allowance where it prints.
MAX_MESSAGES = 4000
MAX_SHOWN_CHARS = 64 << 10


class Display:
    """Collects messages on the client's thread and shows them on the waiting one.

    Every line begins with its rank. One line may stand open at a time: it is continued, or drawn again in place (a
    progress bar). What other ranks write meanwhile is shown when their lines are complete.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, str, dict[str, Any]]] = deque()
        self._num_dropped = 0
        self._show_lock = threading.RLock()
        # (rank, stream) of the line that stands open on the screen, and what of other lines is not shown yet.
        self._open: tuple[int, str] | None = None
        self._held: dict[tuple[int, str], str] = {}
        self._cut: set[tuple[int, str]] = set()

    def take(self, rank: int, message: dict[str, Any]) -> None:
        """One message of a rank's output channel."""
        kind = message["header"]["msg_type"]
        if kind not in ("stream", "display_data", "execute_result"):
            return
        if len(self._queue) >= MAX_MESSAGES:
            self._num_dropped += 1
            return
        self._queue.append((rank, kind, message["content"]))

    def show(self) -> None:
        """Show what came since the last time."""
        with self._show_lock:
            # Messages of one rank keep their order; those of several ranks that came at once are sorted.
            came = [self._queue.popleft() for _ in range(len(self._queue))]
            for rank, kind, content in sorted(came, key=lambda one: one[0]):
                if kind == "stream":
                    self._write((rank, content["name"]), content["text"])
                else:
                    self._rich(rank, content)
            sys.stdout.flush()
            sys.stderr.flush()

    def finish(self) -> None:
        """The call is over: show what is left and close every line."""
        with self._show_lock:
            self.show()
            for source, text in list(self._held.items()):
                self._put(source, text + "\n")
            self._held.clear()
            self._close_line()
            if self._num_dropped:
                print(f"[{self._num_dropped} more outputs not shown: at most {MAX_MESSAGES} at once are]")
                self._num_dropped = 0

    def _write(self, source: tuple[int, str], text: str) -> None:
        text = self._held.pop(source, "") + text.replace("\r\n", "\n")
        *lines, rest = text.split("\n")
        for line in lines:
            self._put(source, _last_drawn(line) + "\n")
        if not rest:
            return
        if self._open not in (None, source):
            self._held[source] = _last_drawn(rest)
        else:
            self._put(source, _last_drawn(rest))

    def _put(self, source: tuple[int, str], text: str) -> None:
        """Write (a part of) one line; a carriage return at its front draws it again."""
        out = _stream(source)
        if self._open is not None and self._open != source:
            self._cut.add(self._open)
            self._close_line()
        if source in self._cut:
            self._cut.discard(source)
            if text == "\n":
                return  # the end of a line that was closed for another rank's
        label = f"[rank {source[0]}] "
        if text.startswith("\r"):
            text = f"\r{label}{text[1:]}" if self._open is not None else f"{label}{text[1:]}"
        elif self._open is None:
            text = label + text
        _print(out, text)
        self._open = None if text.endswith("\n") else source

    def _close_line(self) -> None:
        if self._open is not None:
            _print(_stream(self._open), "\n")
            self._open = None

    def _rich(self, rank: int, content: dict[str, Any]) -> None:
        self._close_line()
        plain = str(content["data"].get("text/plain", ""))
        if get_ipython() is None or set(content["data"]) <= {"text/plain"}:
            if len(plain) > MAX_SHOWN_CHARS:
                plain = f"{plain[:MAX_SHOWN_CHARS]} ... ({len(plain) - MAX_SHOWN_CHARS} characters more)"
            label = f"[rank {rank}] "
            _print(sys.stdout, label + plain.replace("\n", "\n" + " " * len(label)) + "\n")
            return
        _print(sys.stdout, f"[rank {rank}]\n")
        sys.stdout.flush()
        publish_display_data(data=content["data"], metadata=content.get("metadata", {}))


def _last_drawn(line: str) -> str:
    """What stands on the screen after a line was drawn over itself; the carriage return at its front stays."""
    parts = [part for part in line.split("\r") if part]
    return ("\r" if "\r" in line else "") + (parts[-1] if parts else "")


def _stream(source: tuple[int, str]) -> TextIO:
    return sys.stderr if source[1] == "stderr" else sys.stdout


def _print(out: TextIO, text: str) -> None:
    """Write text that the notebook's own stream may not be able to encode."""
    try:
        out.write(text)
    except UnicodeEncodeError:
        encoding = getattr(out, "encoding", None) or "ascii"
        out.write(text.encode(encoding, "backslashreplace").decode(encoding))
