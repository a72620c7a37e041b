"""Follow one run on one thread: poll, keep the newest whole step, hand both to whoever draws."""

import threading
from collections.abc import Callable, Sequence

from labkit.errors import LabError, RankTimeout
from labkit.launch import Run
from labkit.trace import Event

THREAD_NAME = "labkit-cockpit"
# Pictures change at most this often: three times a second.
INTERVAL_S = 0.33

Draw = Callable[[Run, Sequence[Event]], None]


class Live:
    """Follows a run until it ends.

    Args:
        run: what to follow.
        draw: called on the thread with the run and the events of the newest step that every rank finished,
            at most three times a second and only when there is something new; with no events at the end.
        ended: called on the thread once, after the last drawing.
    """

    def __init__(self, run: Run, draw: Draw, ended: Callable[[Run], None]) -> None:
        self._run = run
        self._draw = draw
        self._ended = ended
        self._stop = threading.Event()
        self._steps = NewestStep(run.plan.layout.world_size)
        self._thread = threading.Thread(target=self._follow, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the run to end after its step; returns at once."""
        self._stop.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended and been drawn; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _follow(self) -> None:
        try:
            drawn = -1
            while self._run.state == "running":
                progress = self._run.poll()
                self._steps.add(progress.events)
                if progress.step != drawn:
                    drawn = progress.step
                    self._draw(self._run, self._steps.events())
                self._pause()
            self._draw(self._run, ())
        finally:
            self._ended(self._run)

    def _pause(self) -> None:
        if not self._stop.wait(INTERVAL_S):
            return
        try:
            self._run.stop(timeout_s=INTERVAL_S)
        except RankTimeout:
            return  # the step is not over yet: asked again at the next round
        except LabError:
            threading.Event().wait(INTERVAL_S)  # the ranks are gone: the run's state will say so


class NewestStep:
    """The events of the newest step that all ranks have reported; older ones are forgotten."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._by_step: dict[int, list[Event]] = {}

    def add(self, events: Sequence[Event]) -> None:
        """Take events as they arrive."""
        for event in events:
            if event.step is not None:
                self._by_step.setdefault(event.step, []).append(event)
        newest = self._newest()
        if newest is not None:
            self._by_step = {step: members for step, members in self._by_step.items() if step >= newest}

    def events(self) -> list[Event]:
        """The events of that step; none before the first is complete."""
        newest = self._newest()
        return [] if newest is None else list(self._by_step[newest])

    def _newest(self) -> int | None:
        whole = [
            step for step, members in self._by_step.items() if len({event.rank for event in members}) == self._num_ranks
        ]
        return max(whole, default=None)
