"""A call that runs on several ranks: what came back, in rank order, and who is missing."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from labkit.cluster.checks import check_timeout
from labkit.cluster.display import Display
from labkit.cluster.frames import readable
from labkit.errors import Failure, RankError, RankLost, RankTimeout, ranks_text, text_of
from labkit.wire import Outcome, load_outcome
from labkit.wire.parcel import load_value

POLL_S = 0.1
OUTPUT_TIMEOUT_S = 2.0
DEFAULT_TIMEOUT_S = 3600.0


class Call:
    """One function on some ranks.

    Attributes:
        name: the function's name.
        number: grows by one with each call; an interrupt ends calls up to a number.
        ranks: where it runs, in rank order.
        left: whether the one who waited for it gave up, and nobody else has it: its results are nobody's.
    """

    def __init__(
        self,
        name: str,
        number: int,
        ranks: list[int],
        *,
        tend: Callable[["Call"], None],
        ended: Callable[["Call"], None],
        answered: dict[int, int],
        ahead: Callable[["Call"], list[str]],
    ) -> None:
        self.name, self.number, self.ranks = name, number, ranks
        self.freed_s: float | None = None
        self.left = False
        # From here on, what ranks raise is a consequence of being freed, not a cause.
        self.ending = False
        self._given_up: Exception | None = None
        # `tend` is called again and again while somebody waits: it frees ranks that wait for a failed one.
        # `ended` is called when the last rank answered or died.
        self._tend, self._ended = tend, ended
        self._last_answered = answered
        # The names of earlier calls that keep this one waiting.
        self._ahead = ahead
        self._changed = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self._lost: dict[int, str] = {}
        self._futures: dict[int, Any] = {}
        self._display = Display()
        self._answer: tuple[list[Any], Exception | None] | None = None
        self._end_lock = threading.Lock()

    def __repr__(self) -> str:
        state = "done" if self.done else f"{ranks_text(self.pending())} running"
        return f"<Call {self.number} of {self.name}: {state}>"

    @property
    def done(self) -> bool:
        """Whether every rank answered or died."""
        return not self.pending()

    def pending(self) -> list[int]:
        """Ranks that neither answered nor died."""
        with self._changed:
            if self._given_up is not None:
                return []
            return [rank for rank in self.ranks if rank not in self._outcomes and rank not in self._lost]

    def failed(self) -> bool:
        """Whether some rank raised or died."""
        with self._changed:
            return bool(self._lost or self._given_up) or any(one.failure is not None for one in self._outcomes.values())

    def wait(self, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> bool:
        """Wait until every rank answered or died, showing what the ranks print; False when the time is over."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + check_timeout(timeout_s)
        while not self.done:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            with self._changed:
                self._changed.wait_for(lambda: not self._pending_now(), min(POLL_S, left_s))
            if not self.done:
                self._display.show()
                self._tend(self)
        with self._end_lock:
            self._await_output()
            self._display.finish()
        return True

    def result(self, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list[Any]:
        """What the ranks returned, in rank order.

        Raises:
            RankError: the function raised on one or more ranks.
            RankLost: a rank's process died.
            RankTimeout: not all ranks answered in time; they go on running.
        """
        if not self.wait(timeout_s):
            raise self._late(timeout_s)
        with self._end_lock:
            if self._answer is None:
                self._answer = self._gather()
                # Values may be large: what they came in is not kept beside them.
                self._futures.clear()
                self._outcomes = {rank: replace(one, value=None) for rank, one in self._outcomes.items()}
        values, error = self._answer
        if error is not None:
            raise error
        return values

    def _late(self, timeout_s: float | None) -> RankTimeout:
        missing = self.pending()
        now = f"{ranks_text(missing)} did not finish {self.name} within {timeout_s:g} s"
        ahead = self._ahead(self)
        if ahead:
            one = len(ahead) == 1
            text = f"{now}: a rank runs one call at a time, and {_earlier(ahead)} {'is' if one else 'are'} not over. "
            text += f"Wait for {'it' if one else 'them'} (a training run ends with run.stop()), or end all of it with "
            text += "ranks.interrupt()."
        else:
            text = f"{now} and still work on it. Wait longer, or free them with ranks.interrupt()."
        return RankTimeout(text, missing=missing, action=self.name)

    def attach(self, rank: int, future: Any) -> None:
        """Follow the message that carries the call to one rank (called by the crew)."""
        self._futures[rank] = future
        future.iopub_callbacks.append(partial(self._display.take, rank))
        future.add_done_callback(partial(self._arrived, rank))

    def lose(self, rank: int, signal_name: str) -> None:
        """The rank's process ended before it answered."""
        with self._changed:
            if rank not in self.ranks or rank in self._outcomes or rank in self._lost:
                return
            self._lost[rank] = signal_name
            self._note_change()

    def abandon(self, rank: int) -> None:
        """Give up on a rank that could not be freed: the call ends without it, the rank does not."""
        text = "it waited for the failed ranks and could not be freed: ranks.interrupt(force=True) restarts it"
        self._enter(rank, Outcome(failure=Failure(type="NotFreed", message=text, interrupted=True)))

    def give_up(self, error: Exception) -> None:
        """The cluster itself broke: no answer can come any more."""
        with self._changed:
            if not self._pending_now():
                return
            self._given_up = error
            self._note_change()

    def intact(self) -> bool:
        """Whether every rank still has the process group that the lab built."""
        return all(one.intact for one in self._outcomes.values())

    def symmetric(self) -> bool:
        """Whether every rank failed by itself, in the same way, at the same line: groups are still in step."""
        failures = [one.failure for one in self._outcomes.values()]
        if self._lost or self._given_up or any(one is None or one.interrupted for one in failures):
            return False
        return len({(one.type, one.where, one.traceback) for one in failures if one is not None}) == 1

    def _pending_now(self) -> bool:
        return self._given_up is None and len(self._outcomes) + len(self._lost) < len(self.ranks)

    def _arrived(self, rank: int, future: "Future[Any]") -> None:
        """On the client's thread."""
        try:
            outcome = load_outcome(future.result())
        except BaseException as error:
            if type(error).__name__ in ("EngineError", "CancelledError"):
                return  # the process is gone: the keeper tells how it ended
            outcome = Outcome(failure=Failure(type=type(error).__name__, message=text_of(error)))
        self._last_answered[rank] = max(self._last_answered.get(rank, 0), self.number)
        self._enter(rank, outcome)

    def _enter(self, rank: int, outcome: Outcome) -> None:
        if self.ending and outcome.failure is not None and not outcome.failure.interrupted:
            outcome = replace(outcome, failure=replace(outcome.failure, interrupted=True))
        with self._changed:
            if rank in self._lost or rank in self._outcomes:
                return
            self._outcomes[rank] = outcome
            self._note_change()

    def _note_change(self) -> None:
        """With the lock held: whoever sees that the call is over must find the groups judged already."""
        if self.done:
            self._ended(self)
        self._changed.notify_all()

    def _await_output(self) -> None:
        """What a rank printed travels beside its answer, and may come later."""
        deadline = time.monotonic() + OUTPUT_TIMEOUT_S
        for rank, outcome in self._outcomes.items():
            output = self._futures[rank].output if rank in self._futures else None
            if outcome.printed and output is not None:
                while not output.done() and time.monotonic() < deadline:
                    time.sleep(0.002)

    def _gather(self) -> tuple[list[Any], Exception | None]:
        if self._given_up is not None:
            return [], self._given_up
        if self._lost:
            return [], self._lost_error()
        failures = {rank: one.failure for rank, one in self._outcomes.items() if one.failure is not None}
        values = []
        for rank in self.ranks if not failures else []:
            value, failure = load_value(self._outcomes[rank])
            values.append(value)
            if failure is not None:
                failures[rank] = failure
        if not failures:
            return values, None
        causes = {rank: readable(one) for rank, one in failures.items() if not one.interrupted} or failures
        freed = [rank for rank in sorted(failures) if rank not in causes]
        return [], RankError(causes, freed=freed, action=self.name)

    def _lost_error(self) -> RankLost:
        lost = sorted(self._lost)
        first = next(iter(self._lost))  # the others may have died of it
        how = {rank: self._lost[rank] for rank in lost}
        parts = [f"[{ranks_text([rank])}] process {_ended(how[rank])} during {self.name}." for rank in lost]
        fix = f"Bring it back with ranks.restart({first})." if len(lost) == 1 else "Bring them back with ranks.restart."
        signal_name = how[first] if how[first].startswith("SIG") else ""
        return RankLost(" ".join([*parts, fix]), rank=first, signal=signal_name, lost=lost)


def _earlier(names: list[str]) -> str:
    """Earlier calls by name.

    >>> _earlier(["train", "try_ring", "try_ring"])
    'an earlier call of train and 2 earlier calls of try_ring'
    """
    counts = Counter(names).items()
    return " and ".join(f"{f'{n} earlier calls' if n > 1 else 'an earlier call'} of {name}" for name, n in counts)


def _ended(how: str) -> str:
    return f"was killed by {how}" if how.startswith("SIG") else f"ended by itself ({how})"
