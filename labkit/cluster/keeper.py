"""The keeper: one process that starts, signals and ends everything of one cluster, on one host.

It is the parent of the controller, the store and every rank, and the subreaper of what those start, so a pid that it
signals is one that it has not reaped: never somebody else's. It imports torch once and forks ranks from there. When its
owner (the notebook's kernel) is gone, however that happened, it ends every descendant and itself; when it is killed
itself, the kernel sends its children SIGKILL (`PR_SET_PDEATHSIG`).

Commands and events are lines of JSON on a socket pair inherited from the owner. The process has one thread: it forks.
"""

import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from typing import Any

from labkit.cluster import ending
from labkit.cluster.child import belong, enter

TICK_S = 1.0


class Keeper:
    """The command loop."""

    def __init__(self, link: socket.socket, owner_pid: int) -> None:
        self._link = link
        self._owner_pid = owner_pid
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._watch(owner_pid)
        self._pending = b""
        self._children: dict[int, str] = {}
        self._watched: dict[int, int] = {}
        self._seats: dict[int, socket.socket] = {}
        self._uuids: dict[int, str] = {}
        self._mapped: set[str] = set()
        self.folder = tempfile.mkdtemp(prefix="labkit-")
        self._imports: list[str] = []
        self._preload_id = 0
        self._log_own_errors()

    def serve(self) -> None:
        """Obey until the owner says stop or is gone."""
        self._send({"ready": self.folder, "pid": os.getpid()})
        while self._owner_lives():
            for key, _ in self._selector.select(0 if self._imports else TICK_S):
                if key.fileobj is self._link and not self._read():
                    return
            if self._imports:
                self._import_next()
            self._reap()

    def close(self) -> None:
        """End every descendant and remove what was made on disk."""
        ending.end_descendants(list(self._children))
        ending.remove_files(self._mapped)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _owner_lives(self) -> bool:
        return os.getppid() == self._owner_pid

    def _watch(self, pid: int) -> int | None:
        """Wake up when a process ends (Linux; elsewhere the tick looks)."""
        if not hasattr(os, "pidfd_open"):
            return None
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return None
        self._selector.register(fd, selectors.EVENT_READ)
        return fd

    def _log_own_errors(self) -> None:
        log = os.open(os.path.join(self.folder, "keeper.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def _read(self) -> bool:
        try:
            data = self._link.recv(1 << 16)
        except OSError:
            return False
        if not data:
            return False
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if command["do"] == "stop":
                self.close()
                self._send({"re": command["id"]})
                return False
            self._answer(command)
        return True

    def _answer(self, command: dict[str, Any]) -> None:
        try:
            reply = getattr(self, f"_do_{command['do']}")(command)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        if reply is not None:
            self._send({"re": command["id"], **reply})

    def _do_preload(self, command: dict[str, Any]) -> None:
        """Begin to import what every rank needs, once, before any fork; answered when all is imported."""
        os.environ.update(command["env"])
        sys.path[:] = command["path"]
        self._imports, self._preload_id = list(command["modules"]), command["id"]

    def _import_next(self) -> None:
        """Import one module; programs can be started in between."""
        gc.disable()  # it would look at all these objects again and again, for a fifth of the time
        try:
            importlib.import_module(self._imports.pop(0))
            reply: dict[str, Any] = {
                "num_threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
            }
        except Exception as error:
            traceback.print_exc()
            self._imports.clear()
            reply = {"error": f"{type(error).__name__}: {error}"}
        if not self._imports:
            gc.freeze()  # forked processes leave these pages shared
            gc.enable()
            self._send({"re": self._preload_id, **reply})

    def _do_program(self, command: dict[str, Any]) -> dict[str, Any]:
        """Start a program of its own (the controller, or a rank where forking cannot be used)."""
        parent = os.getpid()
        with open(self._log_path(command["name"]), "ab", opener=_private) as log:
            process = subprocess.Popen(
                command["argv"],
                env=command["env"],
                stdin=subprocess.PIPE if command.get("stdin") else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: belong(parent),
            )
        if command.get("stdin") and process.stdin is not None:
            process.stdin.write(command["stdin"].encode())
            process.stdin.close()
        process.returncode = 0  # reaped here, not by Popen's own garbage collection
        return self._started(process.pid, command["name"], command.get("uuid", ""))

    def _do_fork(self, command: dict[str, Any]) -> dict[str, Any]:
        """Fork a process that already has everything imported; one without a seat waits for `assign`."""
        while self._imports:
            self._import_next()
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._leave(theirs)
            enter(command["target"], command.get("seat"), theirs, self._log_path(command["name"]), parent)
        theirs.close()
        if command.get("seat") is None:
            self._seats[pid] = ours
        else:
            ours.close()
        return self._started(pid, command["name"], (command.get("seat") or {}).get("uuid", ""))

    def _do_assign(self, command: dict[str, Any]) -> dict[str, Any]:
        with self._seats.pop(command["pid"]) as ours:
            ours.sendall(json.dumps(command["seat"]).encode() + b"\n")
        self._children[command["pid"]] = command["name"]
        self._uuids[command["pid"]] = command["seat"]["uuid"]
        return {"pid": command["pid"]}

    def _do_store(self, command: dict[str, Any]) -> dict[str, Any]:
        """Fork the rendezvous store around a listening socket that is bound here, so the port is known at once."""
        listening = socket.create_server((command["host"], 0))
        port = listening.getsockname()[1]
        os.set_inheritable(listening.fileno(), True)
        seat = {"host": command["host"], "port": port, "listen_fd": listening.fileno()}
        reply = self._do_fork({"target": command["target"], "seat": seat, "name": "store"})
        listening.close()
        return {**reply, "port": port}

    def _do_signal(self, command: dict[str, Any]) -> dict[str, Any]:
        """Signal a child that was not reaped; `sent` is False when it is gone already."""
        pid = command["pid"]
        if pid not in self._children:
            return {"sent": False}
        if command["signal"] == signal.SIGKILL:
            self._mapped |= ending.nccl_files(pid)
        os.kill(pid, command["signal"])
        return {"sent": True}

    def _started(self, pid: int, name: str, uuid: str) -> dict[str, Any]:
        self._children[pid], self._uuids[pid] = name, uuid
        fd = self._watch(pid)
        if fd is not None:
            self._watched[pid] = fd
        return {"pid": pid}

    def _reap(self) -> None:
        for pid, status in ending.reap():
            self._forget(pid)
            if name := self._children.pop(pid, None):
                ending.end_session(pid, self._uuids.pop(pid, ""))
                self._send({"exited": pid, "name": name, "status": os.waitstatus_to_exitcode(status)})

    def _forget(self, pid: int) -> None:
        if (fd := self._watched.pop(pid, None)) is not None:
            self._selector.unregister(fd)
            os.close(fd)
        if seat := self._seats.pop(pid, None):
            seat.close()

    def _leave(self, keep: socket.socket) -> None:
        """In a forked child: let go of what belongs to the keeper alone."""
        self._selector.close()
        self._link.close()
        for fd in self._watched.values():
            os.close(fd)
        for seat in self._seats.values():
            seat.close()

    def _log_path(self, name: str) -> str:
        return os.path.join(self.folder, f"{name}.log")

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the owner is gone: the loop sees it next


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def main() -> None:
    """`python -m labkit.cluster.keeper FD OWNER_PID`, started by the owner only."""
    link = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ending.become_subreaper()
    keeper = Keeper(link, int(sys.argv[2]))
    try:
        keeper.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        keeper.close()
        os._exit(0)  # the interpreter's own way out takes long with torch inside, and there is nothing left to do


if __name__ == "__main__":
    main()
