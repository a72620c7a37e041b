"""Frees ranks that wait, and builds the process groups anew."""

import contextlib
import threading
import time
from collections.abc import Callable

from labkit.cluster import probe
from labkit.cluster.call import Call
from labkit.cluster.crew import LOOPBACK, Crew
from labkit.errors import ClusterError, LabError, RankTimeout, ranks_text

# A rank that waited this long, while another one of its call failed, waits for the failed one.
WAITED_S = 1.0
FRESH_BEAT_S = 1.5
# An agent that is silent this long shares its process with a thread that holds the GIL (or the process is stopped),
# unless the machine has so much to do that the agent gets no core.
SILENT_S = 1.2
GIVE_UP_S = 10.0
INTERRUPT_TIMEOUT_S = 10.0
REBUILD_TIMEOUT_S = 60.0
POLL_S = 0.005
BUILD = "building the process group"


class Freeing:
    """Acts on the crew's agents; `force` needs somebody who can restart a rank."""

    def __init__(self, crew: Crew, restart: Callable[[int], None]) -> None:
        self._crew = crew
        self._restart = restart
        self._lock = threading.RLock()
        crew.tend = self.tend

    def interrupt(self, *, force: bool, timeout_s: float) -> tuple[int, ...]:
        """End what runs on every rank and build new groups; returns the ranks that were busy."""
        crew = self._crew
        with self._lock:
            crew.check()
            upto = crew.last_number
            busy = self._busy(upto)
            if busy:
                # From here on, whatever cuts this short, the next run builds new groups first.
                crew.stale = True
            left = self._free(busy, upto, timeout_s)
            if left and not force:
                raise self._stuck(left)
            for rank in left:
                self._restart(rank)
            if crew.stale and len(crew.alive()) == crew.num_ranks:
                self.rebuild()
            return tuple(busy)

    def tend(self, call: Call) -> None:
        """Free the ranks of a call that wait for one that failed or died; ranks that compute are left to finish."""
        if not call.failed():
            return
        pending = call.pending()
        if call.freed_s is not None:
            if time.monotonic() - call.freed_s > GIVE_UP_S:
                for rank in pending:
                    call.abandon(rank)
            return
        if all(self._waits(rank, call.number) for rank in pending):
            self._crew.stale = True
            call.freed_s = time.monotonic()
            call.ending = True
            for rank in pending:
                self._crew.hub.send(rank, "free", upto=call.number)

    def rebuild(self, timeout_s: float = REBUILD_TIMEOUT_S) -> None:
        """Build the world's group on every rank, if it is not good.

        Raises:
            RankLost: a rank is gone.
            RankTimeout: ranks are still busy, or paused.
            ClusterError: a rank could not join.
        """
        crew = self._crew
        with self._lock:
            if not crew.stale:
                return
            self._check_paused()
            crew.stale = False  # an exit from here on sets it again
            crew.generation += 1
            arguments = {
                "world_size": crew.num_ranks,
                "backend": crew.devices.backend,
                "store_host": LOOPBACK,
                "store_port": crew.store_port(),
                "generation": crew.generation,
                "timeout_s": timeout_s,
            }
            try:
                call = crew.submit(BUILD, "labkit.rank.groups:build", (), arguments, list(range(crew.num_ranks)))
                self._finish(call, timeout_s)
            except BaseException as error:
                crew.stale = True
                if not isinstance(error, LabError):
                    # Cut short, perhaps while it was sent: some ranks may wait in it for the others.
                    self._send_free(crew.alive(), crew.last_number)
                raise

    def _finish(self, call: Call, timeout_s: float) -> None:
        """Wait for the groups; if they do not come, no rank is left waiting for them."""
        try:
            in_time = call.wait(timeout_s)
        except BaseException:
            self._send_free(call.pending(), call.number)
            raise
        if not in_time:
            missing = self._free(call.pending(), call.number, INTERRUPT_TIMEOUT_S) or call.pending()
            busy = self._busy(call.number - 1)
            raise self._stuck(missing or busy or call.ranks, action=BUILD)
        try:
            call.result()
        except LabError as error:
            if not isinstance(error, ClusterError | TimeoutError) and not hasattr(error, "lost"):
                raise ClusterError(f"The process group could not be built. {error}") from error
            raise

    def _busy(self, upto: int) -> list[int]:
        """Ranks that still work on a call up to a number, those that a call gave up on included."""
        busy = {rank for call in self._crew.under_way() if call.number <= upto for rank in call.pending()}
        for rank in self._crew.alive():
            _, beat = self._crew.hub.beat(rank)
            if self._crew.answered.get(rank, 0) < beat.get("number", 0) <= upto:
                busy.add(rank)
        return sorted(busy & set(self._crew.alive()))

    def _free(self, busy: list[int], upto: int, timeout_s: float) -> list[int]:
        """Free ranks; returns those that are not free when the time is over, or that nothing but force can free."""
        hub = self._crew.hub
        looks = self._send_free(busy, upto)
        began_s = time.monotonic()
        answered: set[int] = set()
        while left := self._busy(upto):
            waited_s = time.monotonic() - began_s
            answered |= {rank for rank in left if rank not in answered and hub.answer(looks.get(rank, 0), 0.0)}
            if waited_s > timeout_s:
                return left
            if waited_s > SILENT_S * probe.crowding() and all(
                rank not in answered and self._hopeless(rank) for rank in left
            ):
                return left
            time.sleep(POLL_S)
        return []

    def _hopeless(self, rank: int) -> bool:
        """Silent because its process is stopped, or because a thread of it holds the GIL so that the agent waits."""
        member = self._crew.members[rank]
        agent = self._crew.hub.hello(rank).get("thread", 0)
        return member.paused or probe.state(member.pid) == "T" or not probe.wants_core(member.pid, agent)

    def _send_free(self, ranks: list[int], upto: int) -> dict[int, int]:
        for call in self._crew.under_way():
            call.ending = call.ending or call.number <= upto
        for rank in ranks:
            self._crew.hub.send(rank, "free", upto=upto)
        return {rank: self._crew.hub.send(rank, "look") for rank in ranks}

    def _waits(self, rank: int, number: int) -> bool:
        if self._crew.members[rank].paused:
            return False
        age_s, beat = self._crew.hub.beat(rank)
        return age_s < FRESH_BEAT_S and beat.get("number") == number and beat.get("waiting_s", 0.0) >= WAITED_S

    def _check_paused(self) -> None:
        paused = [rank for rank in self._crew.alive() if self._crew.members[rank].paused]
        if paused:
            raise RankTimeout(
                f"{ranks_text(paused)} paused: a process group is built by all {self._crew.num_ranks} ranks. "
                f"Use ranks.resume({paused[0]}).",
                missing=paused,
                action=BUILD,
            )

    def _stuck(self, ranks: list[int], action: str = "interrupt") -> RankTimeout:
        """Name each rank that does not come free, and what it does, seen from outside if need be."""
        answers = self._crew.hub.ask(ranks, "look", 0.3)
        silent = [rank for rank in ranks if rank not in answers and not self._crew.members[rank].paused]
        doing = probe.describe({rank: self._crew.members[rank].pid for rank in silent})
        parts = []
        for rank in ranks:
            member = self._crew.members[rank]
            if member.paused:
                parts.append(f"rank {rank} is paused: use ranks.resume({rank})")
            elif rank in answers:
                stack = answers[rank]["stack"]
                parts.append(f"rank {rank} does not end what it does in {stack[-1] if stack else 'its main thread'}")
            else:
                what = "is stopped" if probe.state(member.pid) == "T" else "holds the GIL"
                parts.append(f"rank {rank} {what}, so its agent cannot answer ({doing[rank]})")
        fix = "ranks.interrupt(force=True) restarts only such ranks."
        return RankTimeout(f"{'; '.join(parts)}. {fix}", missing=ranks, action=action)

    def quietly(self) -> None:
        """Interrupt on the way out of something else: what cannot be freed is left to the next call's message."""
        with contextlib.suppress(LabError):
            self.interrupt(force=False, timeout_s=INTERRUPT_TIMEOUT_S)
