"""Undoes what an answer changed in its rank's process beside its result: the next answer meets the rank as it was."""

import builtins
import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from labkit.rank import calls

__all__ = ["undone"]

# Where learners put functions of their own by assignment. Only what can be called is put back: the rest is torch's own
# state. What was added to a module stays, for a module that is imported late adds itself to its package.
_MODULES = (builtins, json, os, time, random, torch, torch.nn.functional, dist, dist.distributed_c10d, functional)
_CLASSES: tuple[type, ...] = (torch.Tensor, torch.nn.Module, dist.ProcessGroup, dist.Work, json.JSONEncoder)
# Of DeepSpeed, where it is loaded: an answer gets an engine, and trains through these.
_DEEPSPEED_MODULES = ("deepspeed", "deepspeed.comm", "deepspeed.comm.comm", "deepspeed.runtime.engine")
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_OF_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
_SIGNALS = (*_OF_TIMERS, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, calls.SIGNAL)


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """On the way out, put back functions of modules, settings of the process and of torch, and random states."""
    functions = [(owner, _callables(owner)) for owner in (*_MODULES, *_CLASSES, *_of_deepspeed())]
    settings = [(put, get()) for get, put in _SETTINGS]
    modes = len(_get_current_dispatch_mode_stack()), len(_get_current_function_mode_stack())
    try:
        yield
    finally:
        while len(_get_current_dispatch_mode_stack()) > modes[0]:
            _pop_mode()
        while len(_get_current_function_mode_stack()) > modes[1]:
            _pop_function_mode()
        for owner, before in functions:
            _put_back(owner, before)
        for put, value in settings:
            put(value)


def _of_deepspeed() -> list[Any]:
    modules = [sys.modules[name] for name in _DEEPSPEED_MODULES if name in sys.modules]
    return [*modules, *(one.DeepSpeedEngine for one in modules[:1])]


def _callables(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if callable(value) or isinstance(owner, type)}


def _put_back(owner: Any, before: dict[str, Any]) -> None:
    now = vars(owner)
    for name in [name for name, value in before.items() if now.get(name) is not value]:
        with contextlib.suppress(AttributeError, TypeError):  # a slot of the type itself
            setattr(owner, name, before[name])
    if isinstance(owner, type):
        for name in [name for name, value in now.items() if name not in before and callable(value)]:
            delattr(owner, name)


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _set_handlers(before: dict[int, Any]) -> None:
    for timer in _TIMERS:
        signal.setitimer(timer, 0.0)
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


def _set_path(before: list[str]) -> None:
    sys.path[:] = before


def _copies() -> list[tuple[int, int]]:
    """The standard descriptors and copies of them: one that was closed goes to the next socket, and is written to."""
    copies = []
    for number in range(3):
        with contextlib.suppress(OSError):
            copies.append((number, os.dup(number)))
    return copies


def _set_descriptors(copies: list[tuple[int, int]]) -> None:
    for number, copy in copies:
        os.dup2(copy, number)
        os.close(copy)


def _set_collecting(on: bool) -> None:
    (gc.enable if on else gc.disable)()


# How to read a setting, and how to set it. They are looked up here once: an answer may replace the names.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),  # the state of numpy's module-level functions
    (os.getcwd, os.chdir),
    (lambda: dict(os.environ), _set_environment),
    (lambda: list(sys.path), _set_path),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (gc.isenabled, _set_collecting),
    (_copies, _set_descriptors),
    (lambda: {number: signal.getsignal(number) for number in _SIGNALS}, _set_handlers),
    (lambda: threading.excepthook, lambda hook: setattr(threading, "excepthook", hook)),
)
