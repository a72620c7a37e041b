"""ipyparallel underneath: one controller, one engine set per rank, one client; engine ids are rank numbers."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any

import ipyparallel as ipp
from ipyparallel.serialize import PrePickled
from traitlets.config import Config

from labkit.cluster import inside
from labkit.cluster.keeping import Keeping
from labkit.cluster.launchers import KeptControllerLauncher, RankLauncher
from labkit.cluster.ports import Ports
from labkit.errors import ClusterError

# The controller finishes a registration at its next heartbeat: every 3 s by default. Missing beats mean nothing here,
# because the keeper hears of a rank's end at once and a paused rank is not dead.
CONTROLLER_ARGS = [
    "--HeartMonitor.period=100",
    "--HeartMonitor.max_heartmonitor_misses=1000000000",
    "--IPController.use_threads=True",
    "--log-level=40",
]
POLL_S = 0.01
CHECK_S = 0.1
ANSWER_TIMEOUT_S = 60.0
GRACE_S = 1.0
# The notebook waits as long as it likes; an engine must not give up first.
REGISTRATION_TIMEOUT_S = 600
# ipyparallel's client keeps the number of every message it ever sent.
MAX_HISTORY = 10_000


class Engines:
    """Starts engines through the keeper and sends calls to them."""

    def __init__(self, keeping: Keeping, host: str) -> None:
        self._keeping = keeping
        self._lock = threading.Lock()
        log = logging.getLogger("labkit.cluster.engines")
        log.addHandler(logging.NullHandler())
        log.propagate = False
        self._profile_dir = os.path.join(keeping.folder, "profile")
        os.makedirs(os.path.join(self._profile_dir, "security"), mode=0o700)
        self._ports = Ports(host)
        ports = self._ports.numbers
        self._cluster = ipp.Cluster(
            config=Config(),
            load_profile=False,
            log=log,
            profile_dir=self._profile_dir,
            cluster_id="labkit",
            cluster_file="",
            controller_ip=host,
            controller_args=CONTROLLER_ARGS + ([f"--ports={ports[0]}-{ports[-1]}"] if ports else []),
            controller_launcher_class=KeptControllerLauncher,
            engine_launcher_class=RankLauncher,
            delay=0,
            n=1,
            shutdown_atexit=False,
        )
        _run(self._cluster.start_controller(keeping=keeping), ANSWER_TIMEOUT_S)
        self.controller_pid: int = self._cluster.controller.pid
        self.client: ipp.Client | None = None
        self._execute = PrePickled(inside.execute)

    def start(self, seat: dict[str, Any], timeout_s: float, *, start_method: str, spare_pid: int | None = None) -> int:
        """Start one rank; returns its pid. It is reachable after `wait_for`."""
        self._cluster.engines.pop(f"rank{seat['rank']}", None)
        seat = {**seat, "argv": self._engine_argv(seat["rank"])}
        _run(
            self._cluster.start_engines(
                n=1,
                engine_set_id=f"rank{seat['rank']}",
                keeping=self._keeping,
                seat=seat,
                start_method=start_method,
                spare_pid=spare_pid,
            ),
            timeout_s,
        )
        return int(self._cluster.engines[f"rank{seat['rank']}"].pid)

    def connect(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Connect the client; the controller must be up. `check()` is called meanwhile, and raises if it is not."""
        self.client = _run(self._cluster.connect_client(timeout=timeout_s), timeout_s, drop=_close, check=check)

    def wait_for(self, ranks: list[int], timeout_s: float, give_up: Callable[[], bool]) -> list[int]:
        """Wait until the ranks are registered; returns those that are not in time (or when `give_up()` says so)."""
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in ranks if rank not in self._client().ids]:
            if time.monotonic() > deadline or give_up():
                return missing
            time.sleep(POLL_S)
        return []

    def submit(self, rank: int, number: int, name: str, packed: bytes, follow: Callable[[Any], None]) -> None:
        """Send one call.

        `follow` gets ipyparallel's message future, whose result holds the packed outcome, before the message leaves:
        what the rank prints at once would otherwise find nobody listening.
        """
        client = self._client()
        args = [PrePickled(number), PrePickled(name), PrePickled(packed)]
        ident = client._engines[rank].encode()
        with self._lock:
            if len(client.history) > MAX_HISTORY:
                client.history.clear()
            client.send_apply_request(client._mux_stream, self._execute, args, ident=ident, message_future_hook=follow)

    def is_registered(self, rank: int) -> bool:
        """Whether the controller knows an engine of this rank, alive or not."""
        return rank in self._client().ids

    def unregister(self, rank: int, timeout_s: float = 10.0) -> None:
        """Tell the controller that an engine is gone, so that its id is free for the rank's next process."""
        client = self._client()
        # Through the stream, on its own thread: a raw send would take the stream's signal that a message came.
        send = client.session.send
        client._io_loop.add_callback(send, client._query_stream, "unregistration_request", content={"id": rank})
        deadline = time.monotonic() + timeout_s
        while rank in client.ids:
            if time.monotonic() > deadline:
                raise ClusterError(f"The controller did not let go of rank {rank} within {timeout_s:g} s. Start anew.")
            time.sleep(POLL_S)

    def view(self, ranks: list[int]) -> ipp.DirectView:
        """ipyparallel's own view of the ranks, in rank order."""
        view = self._client()[ranks]
        view.block = True
        return view

    def close(self) -> None:
        """Close the client's sockets and end its thread."""
        client, self.client = self.client, None
        if client is not None:
            _close(client)
        self._cluster.engines.clear()
        self._cluster.controller = None
        self._ports.close()

    def _client(self) -> ipp.Client:
        if self.client is None:
            raise ClusterError("These ranks were stopped. Start new ones: ranks = lk.cluster.start(4).")
        return self.client

    def _engine_argv(self, rank: int) -> list[str]:
        return [
            f"--profile-dir={self._profile_dir}",
            "--cluster-id=labkit",
            "--log-level=40",
            f"--IPEngine.id={rank}",
            f"--IPEngine.timeout={REGISTRATION_TIMEOUT_S}",
            "--IPEngine.enable_nanny=False",
            "--IPEngine.max_heartbeat_misses=0",
            "--IPEngine.out_stream_factory=labkit.rank.output.RankStream",
        ]


def _close(client: ipp.Client) -> None:
    with contextlib.suppress(Exception):
        client.close(linger=0)


def _run(
    work: Coroutine[Any, Any, Any],
    timeout_s: float,
    *,
    drop: Callable[[Any], None] = lambda value: None,
    check: Callable[[], None] = lambda: None,
) -> Any:
    """Run a coroutine to its end in a thread of its own: the notebook's loop is running already.

    A result that comes when nobody waits for it any more is given to `drop`. What `check()` raises ends the wait.
    """
    future: Future[Any] = Future()

    def body() -> None:
        try:
            value = asyncio.run(asyncio.wait_for(work, timeout_s))
        except BaseException as error:
            if not future.cancelled():
                future.set_exception(error)
            return
        if future.cancelled():
            drop(value)
        else:
            future.set_result(value)

    threading.Thread(target=body, name="labkit-start", daemon=True).start()
    deadline = time.monotonic() + timeout_s + GRACE_S
    try:
        while not wait([future], CHECK_S).done:
            check()
            if time.monotonic() > deadline:
                raise TimeoutError
        return future.result()
    except TimeoutError as error:
        raise ClusterError(f"ipyparallel did not answer within {timeout_s:g} s. Start anew.") from error
    finally:
        future.cancel()
