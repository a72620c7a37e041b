"""The notebook's end of the keeper: start it, command it, hear which processes ended."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from labkit.errors import ClusterError

COMMAND_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0

OnExit = Callable[[int, int], None]


class Keeping:
    """A keeper that was just launched; orders may be sent at once, `listen` hears what comes of them."""

    def __init__(self) -> None:
        self._on_exit: OnExit = lambda pid, code: None
        self._on_gone: Callable[[], None] = lambda: None
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._write_lock = threading.Lock()
        self._gone = False
        self.folder = ""
        self.pid = 0
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "labkit.cluster.keeper", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
            )
        self._thread = threading.Thread(target=self._listen, name="labkit-keeper", daemon=True)

    def listen(self, on_exit: OnExit, on_gone: Callable[[], None]) -> None:
        """Start to hear the keeper, and wait until it is there.

        Args:
            on_exit: called on the listener's thread with (pid, exit code; negative for a signal) of each ended process.
            on_gone: called once on the listener's thread when the keeper itself is gone.
        """
        self._on_exit, self._on_gone = on_exit, on_gone
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self.folder or self._gone, READY_TIMEOUT_S)
        if not self.folder:
            code = self._process.poll()
            raise ClusterError(f"The keeper process did not start (exit code {code}): is {sys.executable} able to run?")

    def command(self, do: str, timeout_s: float = COMMAND_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        """Send one command and wait for its answer.

        Raises:
            ClusterError: the keeper is gone, did not answer in time, or could not do it.
        """
        return self.answer(self.order(do, **fields), do, timeout_s)

    def order(self, do: str, **fields: Any) -> int:
        """Send one command without waiting; `answer` collects what came of it. Commands are obeyed in order."""
        number = next(self._ids)
        line = json.dumps({"id": number, "do": do, **fields}).encode() + b"\n"
        with self._write_lock:
            try:
                self._link.sendall(line)
            except OSError as error:
                raise ClusterError(_gone_text(do)) from error
        return number

    def answer(self, number: int, do: str, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, Any]:
        """Wait for the answer to an order."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._gone, timeout_s)
            reply = self._answers.pop(number, None)
        if reply is None:
            if self._gone:
                raise ClusterError(_gone_text(do))
            raise ClusterError(f"The keeper did not {do} within {timeout_s:g} s. Look at {self.folder}/keeper.log.")
        if "error" in reply:
            raise ClusterError(f"The keeper could not {do}: {reply['error']}.")
        return reply

    def stop(self) -> None:
        """End every process of the cluster and the keeper itself; safe to call twice."""
        with contextlib.suppress(ClusterError):
            number = self.order("stop")
            if self._thread.is_alive():
                self.answer(number, "stop", STOP_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait(STOP_TIMEOUT_S)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)
        self._link.close()

    def _listen(self) -> None:
        try:
            with self._link.makefile("rb") as lines:
                for line in lines:
                    self._take(json.loads(line))
        except (OSError, ValueError):
            pass
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        self._on_gone()

    def _take(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            self._on_exit(message["exited"], message["status"])
            return
        with self._changed:
            if "ready" in message:
                self.folder, self.pid = message["ready"], message["pid"]
            else:
                self._answers[message["re"]] = message
            self._changed.notify_all()


def python_seat() -> dict[str, Any]:
    """What a rank shares with the notebook: working folder and import path."""
    return {"cwd": os.getcwd(), "path": [os.getcwd(), *(part for part in sys.path if part)]}


def _gone_text(do: str) -> str:
    return f"The keeper of this cluster is gone, so it cannot {do}: its ranks ended with it. Start new ranks."


def _environment() -> dict[str, str]:
    # One thread until the ranks are forked: a process with more cannot be forked safely.
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
