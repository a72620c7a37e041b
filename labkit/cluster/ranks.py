"""`Ranks`: what the notebook holds."""

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from labkit.cluster import magics, status
from labkit.cluster.call import DEFAULT_TIMEOUT_S, Call
from labkit.cluster.checks import check_rank, check_ranks, check_timeout, shown
from labkit.cluster.crew import Crew
from labkit.cluster.freeing import INTERRUPT_TIMEOUT_S, Freeing
from labkit.errors import ClusterError, PlanError, shorten_traceback
from labkit.wire.parcel import check_dotted


class Backend(str):
    """The name "nccl" or "gloo", with the reason for it."""

    reason: str

    def __new__(cls, name: str, reason: str) -> "Backend":
        """A name that carries its reason."""
        self = super().__new__(cls, name)
        self.reason = reason
        return self


class Ranks:
    """Running ranks. Made by `labkit.cluster.start`; a context manager; ends its processes when it is forgotten.

    Attributes:
        world_size: how many ranks there are.
        backend: "nccl" or "gloo"; `.reason` says why.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.world_size = crew.num_ranks
        self.backend = Backend(crew.devices.backend, crew.devices.reason)
        restart = weakref.WeakMethod(self._restart_lost)
        self._freeing = Freeing(crew, lambda rank: restart()(rank))  # type: ignore[misc]
        self._restart_lock = threading.RLock()
        self._steps: dict[int, int] = {}
        crew.hub.subscribe("step", _step_keeper(self._steps))
        self._freeing.rebuild()
        self._end = weakref.finalize(self, crew.stop)
        magics.activate(self)

    def __repr__(self) -> str:
        state = "stopped" if self._crew.stopped else f"{len(self._crew.alive())} of {self.world_size} ranks up"
        start = "forked, imports shared" if self._crew.start_method == "fork" else "spawned"
        return f"<Ranks: {state} over {self.backend} ({self.backend.reason}), {start}>"

    def __len__(self) -> int:
        return self.world_size

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def pids(self) -> dict[int, int]:
        """The process of each living rank."""
        if self._crew.stopped:
            return {}
        return {rank: self._crew.members[rank].pid for rank in self._crew.alive()}

    @property
    def spares(self) -> int:
        """How many processes wait to take the place of a rank."""
        return len(self._crew.spare_pids)

    @property
    def token(self) -> int:
        """Grows whenever the process groups were built anew: groups made before are dead."""
        return self._crew.generation

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._crew.stopped

    def run(
        self,
        fn: Callable[..., Any] | str,
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        block: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Call a function on every rank (or on `ranks`) and return the results in rank order.

        What the ranks print is shown, labelled by rank. A function of the notebook travels by value; names that it does
        not bring are looked up among what `%%px` cells defined on the rank.

        Args:
            fn: the function, or a dotted name such as "package.module:function".
            *args: its arguments.
            ranks: where to run, in the order of the results; all ranks if None.
            timeout_s: how long to wait for all results.
            block: False returns a `Call` at once: `.done`, `.wait(timeout_s)`, `.result(timeout_s)`.
            **kwargs: its keyword arguments.

        Raises:
            RankError: the function raised; `.failures` says what on which rank. Ranks that waited for it are freed.
            RankLost: a rank's process died.
            RankTimeout: not all ranks answered in time; they go on running.
        """
        call = self._submit(_name(fn), fn, args, kwargs, ranks, timeout_s)
        return self._answer(call, timeout_s) if block else call

    def run_cell(self, code: str, *, ranks: Iterable[int] | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Run the text of a cell in the namespace of every rank (or of `ranks`), as `%%px` does."""
        self._answer(self._submit_cell(code, ranks, timeout_s), timeout_s)

    def interrupt(self, *, force: bool = False, timeout_s: float = INTERRUPT_TIMEOUT_S) -> tuple[int, ...]:
        """End what runs on the ranks (a collective, a sleep, a lock, Python) and build new process groups.

        No process is lost. Groups and meshes made by hand are dead afterwards.

        Args:
            force: restart the ranks that cannot be freed: those that hold the GIL or are paused.
            timeout_s: how long to try.

        Returns:
            The ranks that were busy.

        Raises:
            RankTimeout: `.missing` names ranks that do not come free, and what they do.
        """
        return self._freeing.interrupt(force=force, timeout_s=check_timeout(timeout_s))

    def kill(self, rank: int) -> None:
        """Kill a rank's process (SIGKILL) and wait until it is gone; `restart` brings it back."""
        self._crew.check()
        self._crew.end(check_rank(rank, self.world_size))

    def pause(self, rank: int) -> None:
        """Stop a rank's process where it is (SIGSTOP)."""
        self._signal(rank, signal.SIGSTOP, paused=True)

    def resume(self, rank: int) -> None:
        """Let a paused rank go on (SIGCONT)."""
        self._signal(rank, signal.SIGCONT, paused=False)

    def restart(self, rank: int) -> None:
        """Give a rank a new process under the same number (a spare if there is one) and build new groups.

        What runs on other ranks is ended: it cannot go on without the old process. Their processes stay.
        """
        self._crew.check()
        check_rank(rank, self.world_size)
        with self._restart_lock:
            self._restart_lost(rank)
            if len(self._crew.alive()) == self.world_size:
                self._freeing.interrupt(force=False, timeout_s=INTERRUPT_TIMEOUT_S)

    def status(self) -> status.Status:
        """One line per rank: pid, host, device, state, step, group, memory, last heartbeat."""
        self._crew.check()
        return status.take(self._crew, self._steps)

    def stacks(self, ranks: Iterable[int] | None = None, *, timeout_s: float = 1.0) -> dict[int, list[str]]:
        """Where the main thread of each rank is: frames as `function (file:line)`, innermost last.

        Agents answer while their main thread waits. A rank whose agent does not answer in time is left out.
        """
        return {rank: list(answer["stack"]) for rank, answer in self._look(ranks, timeout_s).items()}

    def waiting_s(self, ranks: Iterable[int] | None = None, *, timeout_s: float = 1.0) -> dict[int, float]:
        """For how long each rank, in a call, has neither used a core nor queued for one; ranks that answer in time."""
        return {rank: float(answer["waiting_s"]) for rank, answer in self._look(ranks, timeout_s).items()}

    def under_way(self) -> tuple[str, ...]:
        """The names of the calls that ranks have not answered yet, oldest first."""
        self._crew.check()
        return tuple(call.name for call in self._crew.under_way())

    def left_over(self) -> tuple[str, ...]:
        """Those of `under_way` that nobody waits for any more: their `run` ended with RankTimeout, or by Ctrl-C."""
        self._crew.check()
        return tuple(call.name for call in self._crew.under_way() if call.left)

    def subscribe(self, topic: str, subscriber: Callable[[int, dict[str, Any]], None]) -> Callable[[], None]:
        """Have `subscriber(rank, message)` called, on a background thread, for what ranks report; returns the undo."""
        return self._crew.hub.subscribe(topic, subscriber)

    def tell(self, what: str) -> None:
        """Send a word to every rank's agent: "stop" ends a training run after its step."""
        for rank in self._crew.alive():
            self._crew.hub.send(rank, what)

    def clock_offsets(self) -> dict[int, float]:
        """Seconds to add to each rank's monotonic clock to get this process's, for the ranks that answer."""
        offsets = {rank: self._crew.hub.clock_offset(rank) for rank in self._crew.alive()}
        return {rank: offset for rank, offset in offsets.items() if offset is not None}

    def stop(self) -> None:
        """End every process; safe to call twice."""
        magics.deactivate(self)
        self._end()

    def _submit_cell(self, code: str, ranks: Iterable[int] | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Call:
        if not isinstance(code, str):
            raise PlanError(f"{shown(code)} is of type {type(code).__name__}: the text of a cell is needed.")
        return self._submit("%%px", "labkit.rank.calls:run_cell", (code,), {}, ranks, timeout_s)

    def _submit(
        self,
        name: str,
        fn: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Iterable[int] | None,
        timeout_s: float,
    ) -> Call:
        """Check everything, build groups if they are not good, and send."""
        check_timeout(timeout_s)
        targets = check_ranks(ranks, self.world_size)
        crew = self._crew
        crew.check()
        with self._ends_when_interrupted():
            if crew.stale and len(crew.alive()) == self.world_size:
                self._freeing.rebuild()
            return crew.submit(name, fn, args, kwargs, targets)

    def _answer(self, call: Call, timeout_s: float) -> list[Any]:
        """What a call brings that nobody else can ask: without an answer it is left to itself."""
        try:
            return self._finish(call, timeout_s)
        finally:
            call.left = not call.done

    def _finish(self, call: Call, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        try:
            with self._ends_when_interrupted():
                return call.result(timeout_s)
        finally:
            # What the call brought may be large, and belongs to the caller now.
            with self._crew.lock:
                if call.done:
                    self._crew.calls.discard(call)

    @contextlib.contextmanager
    def _ends_when_interrupted(self) -> Iterator[None]:
        """Ctrl-C in the notebook ends what it waits for."""
        try:
            yield
        except KeyboardInterrupt as error:
            self._freeing.quietly()
            shorten_traceback(error)
            raise

    def _look(self, ranks: Iterable[int] | None, timeout_s: float) -> dict[int, dict[str, Any]]:
        """What the agents of ranks see, of those that answer in time."""
        self._crew.check()
        return self._crew.hub.ask(check_ranks(ranks, self.world_size), "look", check_timeout(timeout_s))

    def _signal(self, rank: int, number: signal.Signals, *, paused: bool) -> None:
        self._crew.check()
        member = self._crew.members[check_rank(rank, self.world_size)]
        if member.lost:
            raise ClusterError(
                f"rank {rank} is gone ({member.lost}): only a living rank can be paused or go on. "
                f"Use ranks.restart({rank})."
            )
        self._crew.signal(rank, number)
        member.paused = paused

    def _restart_lost(self, rank: int) -> None:
        """End a rank's process, if it lives, and start the next; groups are not built."""
        crew = self._crew
        crew.stale = True
        crew.end(rank)
        crew.renew(rank)


def _name(fn: Any) -> str:
    """How a call is named; refuses what is no function."""
    if isinstance(fn, str):
        check_dotted(fn)
        return fn.partition(":")[2]
    if not callable(fn):
        kind = type(fn).__name__
        raise PlanError(f"{shown(fn)} is of type {kind}, not a function: give ranks.run the function itself.")
    return str(getattr(fn, "__qualname__", type(fn).__name__)).rpartition("<locals>.")[2]


def _step_keeper(steps: dict[int, int]) -> Callable[[int, dict[str, Any]], None]:
    def keep(rank: int, message: dict[str, Any]) -> None:
        steps[rank] = int(message["step"])

    return keep


__all__ = ["Backend", "Call", "Ranks"]
