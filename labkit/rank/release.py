"""Frees a rank whose main thread waits for others, without their help.

A thread that waits inside gloo never sees a signal: it returns when the connections under its group end (`dead_ends`),
and a thread that waits for the rendezvous store when its connection to it is shut down. So every socket that a group
opens is noted while the group is being built, and the agent's thread ends those, and only those. On NCCL the
communicator's abort does the same. Groups are dead afterwards; `groups.build` makes new ones in the same process.
"""

import contextlib
import functools
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from labkit.rank import dead_ends

MAX_PAIRS = 64
PRETEND_TIMEOUT_S = 0.2

_PAIR = struct.Struct("@n")
_lock = threading.Lock()
_of_groups: set[str] = set()
_of_store: set[str] = set()
_replaced: set[str] = set()
_control_ports: set[int] = set()
# The sockets that stood before a group began to be built: what was opened since belongs to it, though it is not done.
_before: set[str] | None = None


def install(control_ports: set[int]) -> None:
    """Watch every group that this process builds from now on (default group, `new_group`, device meshes).

    Args:
        control_ports: where the notebook listens: connections to these are never shut down.
    """
    _control_ports.update(control_ports)
    core = dist.distributed_c10d
    if not hasattr(core._new_process_group_helper, "watched"):
        core._new_process_group_helper = _watched(core._new_process_group_helper)


def open_store(make: Callable[[], Any]) -> Any:
    """Call `make()`, which connects to the rendezvous store, and note the connection."""
    before = _sockets()
    store = make()
    with _lock:
        _of_store.clear()
        _of_store.update(_sockets() - before)
    return store


def forget() -> None:
    """Forget sockets of groups that are gone; a number may come back for something else."""
    with _lock:
        _of_groups.clear()
        _replaced.clear()
    dead_ends.close_all()


def shut(*, waited_on: bool = False, everything: bool = False) -> int:
    """Shut down every noted socket.

    Args:
        waited_on: the main thread waits on them (this is the agent's thread): their operations are told. Only while no
            other rank ends its side: gloo must not be closing a connection that is being replaced.
        everything: whatever connection the process holds, but for the lab's own; for a wait that nothing else ends.

    Returns:
        How many sockets were shut down.
    """
    with _lock:
        begun = _sockets() - _before if _before is not None else set()
        connected = _of_groups - begun
        ours = _of_groups | _of_store | begun
        if everything:
            ours |= _sockets()
    files = [(fd, name) for fd, name in _open_files() if name in ours]
    for fd, name in files:
        if name in begun:
            _pretend(fd)
    replaced = dead_ends.put([fd for fd, name in files if name in connected and _may_end(fd)]) if waited_on else []
    with _lock:
        # Their connections stay open for the other side's sake.
        _replaced.update(name for fd, name in files if fd in replaced)
    return sum(_shut_down(fd) for fd, name in files if name not in _replaced) + len(replaced) + _abort_nccl()


def _watched(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def building(*args: Any, **kwargs: Any) -> Any:
        global _before
        with _lock:
            _before = _sockets()
        try:
            return build(*args, **kwargs)
        finally:
            with _lock:
                _of_groups.update(_sockets() - (_before or set()))
                _before = None

    building.watched = True  # type: ignore[attr-defined]
    return building


def _abort_nccl() -> int:
    """Abort the world's NCCL communicators; gloo groups are freed by their sockets alone."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
        return 1
    return 0


def _open_files() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # the descriptor of the listing itself, or one just closed
    return found


def _sockets() -> set[str]:
    return {name for _, name in _open_files() if name.startswith("socket:")}


def _pretend(fd: int) -> None:
    """Call one's own gloo listener as the ranks would for which it still waits: nothing else ends that wait.

    A caller says the number of the pair that it belongs to; each new group counts them from 0. The connection is closed
    at once, and the group that is being built fails on it.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener:
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or listener.family == socket.AF_UNIX:
            return
        for number in range(MAX_PAIRS):
            with socket.create_connection(listener.getsockname()[:2], timeout=PRETEND_TIMEOUT_S) as caller:
                caller.sendall(_PAIR.pack(number))


def _shut_down(fd: int) -> bool:
    def shut_down(connection: socket.socket) -> bool:
        if _is_connection(connection):
            connection.shutdown(socket.SHUT_RDWR)
            return True
        return False

    return bool(dead_ends.with_socket(fd, shut_down))


def _may_end(fd: int) -> bool:
    return bool(dead_ends.with_socket(fd, _is_connection))


def _is_connection(sock: socket.socket) -> bool:
    """Whether this is a TCP connection to another process, and not one of the lab's own.

    Raises:
        OSError: it was never connected.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False  # gloo ends the process when its listener fails
    # The engine may have connected to the notebook while a group was being built.
    return sock.getpeername()[1] not in _control_ports
