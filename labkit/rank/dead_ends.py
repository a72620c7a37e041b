"""Puts a dead end in the place of a gloo connection, so that whoever waits on it is told.

Shutting a connection down is not enough. When gloo learns that a connection has ended it tells every operation that
waits on it, except for sends that it has queued because the connection would not take them
(`gloo/transport/tcp/pair.cc`, `signalException`: of the queue `tx_` only bound buffers are told); such a send waits
until the group's time limit. So the descriptor is first replaced by one end of a socket pair whose other end takes
everything: queued sends complete. Then that end says that nothing more will come, which gloo takes for the end of the
connection while nothing is queued.

The connection itself stays open until `close_all`: its other end belongs to a rank that may still have to do the same.
"""

import ctypes
import os
import platform
import re
import select
import socket
import threading
import time
from collections.abc import Callable

DRAIN_BYTES = 1 << 20
QUIET_S = 0.02
DRAIN_TIMEOUT_S = 0.5

_EVENTS = re.compile(r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+)", re.MULTILINE)
_WANTED = select.EPOLLIN | select.EPOLLOUT | select.EPOLLPRI | select.EPOLLET | select.EPOLLONESHOT
_ADD, _DELETE = 1, 2

_epoll_ctl = ctypes.CDLL(None).epoll_ctl
_lock = threading.Lock()
# The other ends of the replaced descriptors, and the connections that these held.
_ends: list[socket.socket] = []
_connections: list[int] = []


class _Event(ctypes.Structure):
    """`struct epoll_event`, which the kernel packs on x86-64 only."""

    _pack_ = 1 if platform.machine() in ("x86_64", "AMD64") else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def put(fds: list[int]) -> list[int]:
    """Replace connections by dead ends and tell their owner that they ended; called from the agent's thread.

    Returns:
        The descriptors that were replaced; the others are watched by no event loop, or are closed meanwhile.
    """
    with _lock:
        watched = _watched()
        done = [fd for fd in fds if fd in watched and _replace(fd, *watched[fd])]
        if done:
            _drain()
            for end in _ends:
                _say_end(end)
        return done


def close_all() -> None:
    """Let go of both sides of every replaced connection: the groups that used them are gone."""
    with _lock:
        for end in _ends:
            end.close()
        for connection in _connections:
            os.close(connection)
        _ends.clear()
        _connections.clear()


def _watched() -> dict[int, tuple[int, int, int]]:
    """Descriptors that event loops of this process watch: {fd: (epoll fd, events, data)}, from `/proc`."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}") as file:
                text = file.read()
        except OSError:
            continue
        for fd, events, data in _EVENTS.findall(text):
            found[int(fd)] = (int(name), int(events, 16) & _WANTED, int(data, 16))
    return found


def _replace(fd: int, epoll: int, events: int, data: int) -> bool:
    """Put one end of a new socket pair under the descriptor's number, watched as the connection was.

    Between these lines gloo must not close the descriptor, so a connection that has ended already is left to it.
    """
    event = _Event(events=events, data=data)
    end, inside = socket.socketpair()
    end.setblocking(False)
    inside.setblocking(False)
    with inside:
        try:
            connection = os.dup(fd)
        except OSError:
            end.close()
            return False
        if _has_ended(fd) or _epoll_ctl(epoll, _DELETE, fd, ctypes.byref(event)) != 0:
            os.close(connection)
            end.close()
            return False
        os.dup2(inside.fileno(), fd)
        # Refused where gloo's own thread has just added it: then it is watched already.
        _epoll_ctl(epoll, _ADD, fd, ctypes.byref(event))
    _ends.append(end)
    _connections.append(connection)
    return True


def with_socket(fd: int, ask: Callable[[socket.socket], bool]) -> bool | None:
    """Ask something of the socket under a descriptor of gloo's, which stays open; None where it is closed meanwhile."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            return ask(copy)
    except OSError:
        return None


def _has_ended(fd: int) -> bool:
    return with_socket(fd, _says_end) in (True, None)


def _says_end(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _drain() -> None:
    """Take what is sent until it has been quiet for a moment: every queued send is then complete."""
    began_s = quiet_since_s = time.monotonic()
    while time.monotonic() - quiet_since_s < QUIET_S and time.monotonic() - began_s < DRAIN_TIMEOUT_S:
        ready, _, _ = select.select(_ends, [], [], QUIET_S / 4)
        num_taken = sum(_take(end) for end in ready)
        if num_taken:
            quiet_since_s = time.monotonic()


def _take(end: socket.socket) -> int:
    try:
        return len(end.recv(DRAIN_BYTES))
    except OSError:
        return 0


def _say_end(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # its owner has closed it
