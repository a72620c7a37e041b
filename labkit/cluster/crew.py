"""The processes behind `Ranks`: who is up, which calls are under way, whether the groups are good."""

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from labkit.cluster import ending
from labkit.cluster.call import Call
from labkit.cluster.devices import Devices
from labkit.cluster.engines import Engines
from labkit.cluster.hub import Hub
from labkit.cluster.keeping import Keeping, python_seat
from labkit.errors import ClusterError, RankLost, ranks_text
from labkit.wire import pack_call

LOOPBACK = "127.0.0.1"
STOPPED = "These ranks were stopped. Start new ones: ranks = lk.cluster.start(4)."
EXIT_TIMEOUT_S = 20.0


@dataclass(slots=True)
class Member:
    """One rank's present process."""

    rank: int
    pid: int
    uuid: str
    lost: str = ""
    paused: bool = False
    gone: threading.Event = field(default_factory=threading.Event)


class Crew:
    """Everything of one cluster that must end with it."""

    def __init__(
        self, keeping: Keeping, num_ranks: int, devices: Devices, start_method: str, num_threads: int, timeout_s: float
    ) -> None:
        self.keeping, self.num_threads = keeping, num_threads
        self.num_ranks, self.devices, self.start_method, self.timeout_s = num_ranks, devices, start_method, timeout_s
        self.owner = os.getpid()
        self.lock = threading.RLock()
        self.members: dict[int, Member] = {}
        self.spare_pids: list[int] = []
        self.calls: set[Call] = set()
        self.stopped = False
        self._broken = ""
        self._store_pid = self._store_port = 0
        self.generation = 0
        self.stale = True
        self.last_number = 0
        self.tend: Callable[[Call], None] = lambda call: None
        self._numbers = itertools.count(1)
        self._exits: dict[int, str] = {}
        # The last call that each rank answered: a heartbeat on its way may still name it as running.
        self.answered: dict[int, int] = {}
        self._key = secrets.token_bytes(32)
        try:
            self.keeping.listen(self._on_exit, self._on_keeper_gone)
            self.hub = Hub(self._key, LOOPBACK)
            self.engines = Engines(self.keeping, LOOPBACK)
        except BaseException:
            self.stop()
            raise

    # -- starting ----------------------------------------------------------------------------------------------------

    def boot(self, num_spares: int, preload: int) -> None:
        """Start the store, the ranks and the spares, and wait until every rank answers.

        Args:
            num_spares: processes to keep ready.
            preload: the order to import what ranks need, which the keeper obeys already.
        """
        deadline = time.monotonic() + self.timeout_s
        self.engines.connect(self.timeout_s, self._check_controller)
        self.keeping.answer(preload, "preload", max(1.0, deadline - time.monotonic()))
        self.store_port()
        for rank in range(self.num_ranks):
            self._seat(rank)
        for _ in range(num_spares):
            self.add_spare()
        self._await(list(self.members), deadline)

    def _check_controller(self) -> None:
        """Raise if the controller has ended, also where that was heard of before it had a name here."""
        with self.lock:
            how = self._exits.get(self.engines.controller_pid)
        if how is not None and not self._broken:
            self._break(self._controller_ended(self.engines.controller_pid, how))
        self.check()

    def add_spare(self) -> None:
        """Fork one more process that waits for a seat."""
        reply = self.keeping.command(
            "fork", target="labkit.cluster.engine:run", seat=None, name=f"spare{time.time_ns()}"
        )
        self.spare_pids.append(reply["pid"])

    def renew(self, rank: int) -> None:
        """Give a rank whose process has ended a new one: a spare if there is one, else a fresh process."""
        if self.engines.is_registered(rank):
            self.engines.unregister(rank)
        self._seat(rank, self.spare_pids.pop() if self.spare_pids else None)
        self._await([rank], time.monotonic() + self.timeout_s)

    def _seat(self, rank: int, spare_pid: int | None = None) -> None:
        one = uuid.uuid4().hex
        seat = {
            **python_seat(),
            "rank": rank,
            "uuid": one,
            "env": {
                ending.SEAT_VARIABLE: one,
                "LABKIT_RANK": str(rank),
                "LABKIT_BACKEND": self.devices.backend,
                "CUDA_VISIBLE_DEVICES": self.devices.visible[rank],
                "GLOO_SOCKET_IFNAME": _loopback(),
            },
            "key": self._key.hex(),
            "hub_host": self.hub.host,
            "hub_port": self.hub.port,
            "num_threads": self.num_threads,
        }
        pid = self.engines.start(seat, self.timeout_s, start_method=self.start_method, spare_pid=spare_pid)
        member = Member(rank=rank, pid=pid, uuid=one)
        with self.lock:
            self.members[rank] = member
            if pid in self._exits:  # it ended before it had a name here
                member.lost = self._exits[pid]
                member.gone.set()

    def _await(self, ranks: list[int], deadline: float) -> None:
        def give_up() -> bool:
            return any(self.members[rank].lost for rank in ranks)

        late = self.engines.wait_for(ranks, max(0.1, deadline - time.monotonic()), give_up)
        late = late or self.hub.wait_for(
            {r: self.members[r].uuid for r in ranks}, max(0.1, deadline - time.monotonic())
        )
        dead = {rank: self.members[rank].lost for rank in ranks if self.members[rank].lost}
        if dead:
            how = ", ".join(f"rank {rank} ({how})" for rank, how in dead.items())
            raise ClusterError(
                f"{len(dead)} of {len(ranks)} ranks ended while starting: {how}. {self._last_words(f'rank{min(dead)}')}"
            )
        if late:
            raise ClusterError(
                f"{ranks_text(late)} did not register within {self.timeout_s:g} s. Give start() a larger timeout_s."
            )

    def _last_words(self, name: str) -> str:
        try:
            with open(os.path.join(self.keeping.folder, f"{name}.log"), errors="replace") as log:
                lines = [line.rstrip() for line in log.readlines()[-4:] if line.strip()]
        except OSError:
            lines = []
        return "Its last words: " + " | ".join(lines) if lines else "It left no message."

    # -- processes ---------------------------------------------------------------------------------------------------

    def alive(self) -> list[int]:
        """Ranks whose process is there, paused ones included."""
        return [rank for rank, member in sorted(self.members.items()) if not member.lost]

    def signal(self, rank: int, number: signal.Signals) -> bool:
        """Signal a rank's process through its keeper; False when it is gone."""
        reply = self.keeping.command("signal", pid=self.members[rank].pid, signal=int(number))
        return bool(reply["sent"])

    def end(self, rank: int) -> None:
        """End a rank's process and wait until that is noticed."""
        member = self.members[rank]
        if not member.lost:
            self.signal(rank, signal.SIGKILL)
        if not member.gone.wait(EXIT_TIMEOUT_S):
            raise ClusterError(f"rank {rank} (pid {member.pid}) did not end within {EXIT_TIMEOUT_S:g} s of SIGKILL.")

    def _on_exit(self, pid: int, code: int) -> None:
        """On the keeper's listener thread."""
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        with self.lock:
            self._exits[pid] = how
            if pid in self.spare_pids:
                self.spare_pids.remove(pid)
            if pid == self._store_pid:
                self._store_pid, self.stale = 0, True  # the next groups get a new store
            found = [member for member in self.members.values() if member.pid == pid]
            for member in found:
                member.lost, member.paused = how, False
                self.stale = True
            calls = list(self.calls)
            controller_pid = self.engines.controller_pid if hasattr(self, "engines") else 0
        if pid == controller_pid and not self.stopped:
            self._break(self._controller_ended(pid, how))
        for member in found:
            for call in calls:
                call.lose(member.rank, how)
            self.hub.forget(member.rank)
            member.gone.set()

    def _on_keeper_gone(self) -> None:
        if self.stopped:
            return
        with self.lock:
            members = list(self.members.values())
            for member in members:
                member.lost = member.lost or "SIGKILL"
        self._break(f"The keeper of these ranks (pid {self.keeping.pid}) ended, and they ended with it.")
        sessions = {member.pid for member in members}
        if hasattr(self, "engines"):
            sessions.add(self.engines.controller_pid)
        ending.end_orphans({member.uuid for member in members}, sessions)
        shutil.rmtree(self.keeping.folder, ignore_errors=True)
        for member in members:
            member.gone.set()

    def _controller_ended(self, pid: int, how: str) -> str:
        words = "" if how.startswith("SIG") else f" {self._last_words('controller')}"
        return f"ipyparallel's controller (pid {pid}) ended ({how}), and ranks cannot be reached without it.{words}"

    def _break(self, why: str) -> None:
        """Nothing can run here any more: say so to whoever waits and whoever comes."""
        with self.lock:
            self._broken = f"{why} Start new ones: ranks = lk.cluster.start({self.num_ranks})."
            calls = list(self.calls)
        for call in calls:
            call.give_up(ClusterError(self._broken))

    def store_port(self) -> int:
        """The rendezvous store's port; a new store takes the place of one that ended."""
        if not self._store_pid:
            # Without the lock: the answer comes on the listener's thread, which may be waiting for it.
            reply = self.keeping.command("store", host=LOOPBACK, target="labkit.rank.store:serve")
            with self.lock:
                self._store_port = int(reply["port"])
                self._store_pid = 0 if reply["pid"] in self._exits else reply["pid"]
        return self._store_port

    # -- calls -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless the ranks can be used from this process."""
        if self.stopped:
            raise ClusterError(STOPPED)
        if self._broken:
            raise ClusterError(self._broken)
        if os.getpid() != self.owner:
            raise ClusterError(f"These ranks belong to process {self.owner}, not to its child {os.getpid()}.")

    def submit(self, name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: list[int]) -> Call:
        """Send one call to some ranks at once; every rank gets calls in the same order."""
        packed = pack_call(fn, args, kwargs)
        with self.lock:
            self.check()
            self._check_alive(ranks)
            call = Call(
                name,
                next(self._numbers),
                ranks,
                tend=self.tend,
                ended=self._on_ended,
                answered=self.answered,
                ahead=self._ahead,
            )
            self.last_number = call.number
            self.calls = {one for one in self.calls if not one.done} | {call}
            try:
                self._send(call, packed)
            except BaseException:
                call.give_up(ClusterError(f"{name} was cut short while it was sent to the ranks."))
                raise
        return call

    def _send(self, call: Call, packed: bytes) -> None:
        for rank in call.ranks:
            # A rank whose engine is not registered any more has ended: the keeper will say how.
            with contextlib.suppress(KeyError):
                self.engines.submit(rank, call.number, call.name, packed, partial(call.attach, rank))

    def _check_alive(self, ranks: list[int]) -> None:
        dead = [rank for rank in ranks if self.members[rank].lost]
        if dead:
            how = self.members[dead[0]].lost
            raise RankLost(
                f"{ranks_text(dead)} {'is' if len(dead) == 1 else 'are'} gone ({how}). Use ranks.restart({dead[0]}).",
                rank=dead[0],
                signal=how if how.startswith("SIG") else "",
                lost=dead,
            )

    def _on_ended(self, call: Call) -> None:
        """A call is over on every rank: groups are out of step after a failure that is not the same everywhere."""
        if not call.intact() or (call.failed() and not call.symmetric()):
            self.stale = True

    def _ahead(self, call: Call) -> list[str]:
        pending = set(call.pending())
        return [one.name for one in self.under_way() if one.number < call.number and pending & set(one.pending())]

    def under_way(self) -> list[Call]:
        """Calls that some living rank still has to answer."""
        with self.lock:
            self.calls = {one for one in self.calls if not one.done}
            return sorted(self.calls, key=lambda one: one.number)

    def stop(self) -> None:
        """End everything; safe to call twice, from any thread of the owner."""
        with self.lock:
            if self.stopped or os.getpid() != self.owner:
                return
            self.stopped = True
            calls = list(self.calls)
        for call in calls:
            call.give_up(ClusterError(f"The ranks were stopped during {call.name}."))
        self.keeping.stop()
        for member in self.members.values():
            member.gone.set()
        for part in ("engines", "hub"):
            if hasattr(self, part):
                with contextlib.suppress(Exception):
                    getattr(self, part).close()


def _loopback() -> str:
    """The loopback interface: `lo` on Linux, `lo0` on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"
