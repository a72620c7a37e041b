"""A sandbox whose boxes can all be ended from another thread: what Ctrl-C does to a batch."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from labkit.errors import LabError
from labkit.grade.sandbox import Box, Sandbox

__all__ = ["StoppableSandbox", "Stopped"]


class Stopped(LabError):
    """The batch is being stopped: nothing is started any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppableSandbox(Sandbox):
    """A sandbox that knows what runs in it."""

    boxes: list[Box] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def run(self, argv: Sequence[str], stdin: bytes) -> Iterator[Box]:
        """As `Sandbox.run`.

        Raises:
            Stopped: `stop` was called.
        """
        if self.stopped.is_set():
            raise Stopped("the batch is being stopped.")
        with Sandbox.run(self, argv, stdin) as box:
            self.boxes.append(box)
            try:
                yield box
            finally:
                self.boxes.remove(box)

    def stop(self) -> None:
        """End all that runs in it now; to be called until every thread that uses it has returned."""
        self.stopped.set()
        for box in tuple(self.boxes):
            for process in box.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
