"""The first steps of a forked process: it belongs to its parent, has its own session and log, and enters its target."""

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the operating system send SIGKILL when the parent ends (Linux); end at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def belong(parent: int) -> None:
    """Die with the parent, and heed the signals that the keeper ignores."""
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def enter(target: str, seat: dict[str, Any] | None, link: socket.socket, log_path: str, parent: int) -> None:
    """Run `package.module:function` with its seat (read from the link when it comes later) and never return."""
    status = 1
    try:
        belong(parent)
        os.setsid()
        _log_to(log_path)
        if seat is None:
            seat = _wait_for_seat(link)
        link.close()
        module, _, name = target.partition(":")
        getattr(importlib.import_module(module), name)(seat)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait_for_seat(link: socket.socket) -> dict[str, Any]:
    with link.makefile("rb") as lines:
        line = lines.readline()
    if not line:
        os._exit(0)  # never needed: the keeper closed the link
    seat = json.loads(line)
    return dict(seat)


def _log_to(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
