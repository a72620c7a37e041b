"""Shows what ranks print and display, labelled by rank, in the thread that waits for them."""

import sys
from collections import deque
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data

# What one call may show in all; each rank has its own, smaller allowance where it prints.
MAX_MESSAGES = 4000


class Display:
    """Collects messages on the client's thread and shows them on the waiting one."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, str, dict[str, Any]]] = deque(maxlen=MAX_MESSAGES)
        self._last: tuple[int, str] | None = None
        self._open_line = False

    def take(self, rank: int, message: dict[str, Any]) -> None:
        """One message of a rank's output channel."""
        self._queue.append((rank, message["header"]["msg_type"], message["content"]))

    def show(self) -> None:
        """Show what came since the last time."""
        while self._queue:
            rank, kind, content = self._queue.popleft()
            if kind == "stream":
                self._write(rank, content["name"], content["text"])
            elif kind in ("display_data", "execute_result"):
                self._rich(rank, kind, content)

    def _write(self, rank: int, stream: str, text: str) -> None:
        """Prefix every line with its rank; a line that one write leaves open may be continued by the next."""
        out = sys.stderr if stream == "stderr" else sys.stdout
        if self._open_line and self._last != (rank, stream):
            print(file=out)
            self._open_line = False
        self._last = (rank, stream)
        for line in text.splitlines(keepends=True):
            out.write(line if self._open_line else f"[rank {rank}] {line}")
            self._open_line = not line.endswith("\n")
        out.flush()

    def _rich(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        if self._open_line:
            print()
            self._open_line = False
        plain = content["data"].get("text/plain", "")
        if get_ipython() is None or set(content["data"]) <= {"text/plain"}:
            lines = str(plain).splitlines() or [""]
            print(f"[rank {rank}] " + "\n         ".join(lines))
            return
        print(f"[rank {rank}]")
        publish_display_data(data=content["data"], metadata=content.get("metadata", {}))
