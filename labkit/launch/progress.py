"""How far a run is: a value for programs, one updating line for people."""

import sys
import time
from dataclasses import dataclass

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle

from labkit.trace import Event

__all__ = ["Line", "Progress", "progress_text"]

MIN_UPDATE_S = 0.2
BAR_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run at one moment.

    Attributes:
        step: how many steps are finished.
        losses: the loss of each of them.
        grad_norms: the global gradient norm of each, before clipping.
        events: what ranks did since the last `poll()`; seconds since the run began, on one clock.
        state: "running", "done", "stopped" or "failed".
    """

    step: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    events: tuple[Event, ...]
    state: str


def progress_text(*, step: int, num_steps: int, loss: float, tokens_per_s: float | None, state: str) -> str:
    """The line: bar, step, loss, tokens per second, and the state once it is over.

    >>> progress_text(step=5, num_steps=10, loss=2.5, tokens_per_s=12345.6, state="running")
    '██████████░░░░░░░░░░ step 5/10 · loss 2.5000 · 12,346 tokens/s'
    """
    filled = BAR_WIDTH * step // max(num_steps, 1)
    parts = [f"{'█' * filled}{'░' * (BAR_WIDTH - filled)} step {step}/{num_steps}"]
    if step:
        parts.append(f"loss {loss:.4f}")
    if tokens_per_s:
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    if state != "running":
        parts.append(state)
    return " · ".join(parts)


class Line:
    """One line that is rewritten in place: a notebook's output keeps its last text, a terminal too.

    Where neither is there (a log file, a pipe), only the last text is printed.
    """

    def __init__(self) -> None:
        shell = get_ipython()
        self._handle = DisplayHandle() if shell is not None and hasattr(shell, "kernel") else None
        self._terminal = self._handle is None and sys.stdout.isatty()
        self._shown: str | None = None
        self._width = 0
        self._at_s = 0.0

    def update(self, text: str, *, final: bool = False) -> None:
        """Show the text, at most five times a second unless it is the final one."""
        now = time.monotonic()
        if not final and (text == self._shown or now - self._at_s < MIN_UPDATE_S):
            return
        self._at_s = now
        if self._handle is not None:
            self._draw(self._handle, text)
        elif self._terminal:
            print(f"\r{text.ljust(self._width)}", end="\n" if final else "", flush=True)
        elif final:
            print(text, flush=True)
        self._shown, self._width = text, len(text)

    def _draw(self, handle: DisplayHandle, text: str) -> None:
        data = {"text/plain": text}
        if self._shown is None:
            handle.display(data, raw=True)
        else:
            handle.update(data, raw=True)
