"""Frees a rank whose main thread waits for others, without their help.

A thread that waits inside gloo never sees a signal: it returns when the sockets under its group are shut down, and a
thread that waits for the rendezvous store when its connection to it is. So every socket that a group opens is noted
while the group is being built, and the agent's thread shuts those, and only those, down. On NCCL the communicator's
abort does the same. Groups are dead afterwards; `groups.build` makes new ones in the same process.
"""

import functools
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_lock = threading.Lock()
_of_groups: set[str] = set()
_of_store: set[str] = set()
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


def shut() -> int:
    """Shut down every noted socket; called from the agent's thread while the main thread waits.

    Returns:
        How many sockets were shut down.
    """
    with _lock:
        ours = _of_groups | _of_store
        if _before is not None:
            ours |= _sockets() - _before
    return sum(_shut_down(fd) for fd, name in _open_files() if name in ours) + _abort_nccl()


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


def _shut_down(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                return False
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False  # gloo ends the process when its listener fails
            if copy.getpeername()[1] in _control_ports:
                return False  # the engine connected while a group was being built
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # closed meanwhile, or never connected
    return True
