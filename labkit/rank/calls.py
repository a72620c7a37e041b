"""Runs what the notebook asks, one call at a time in the main thread, and lets the agent interrupt it.

Every call has a number that only grows. An interrupt says "everything up to number N": the call that runs is ended, and
calls that are still queued end before they begin, while later ones are not touched, whenever the signal arrives.
"""

import asyncio
import signal
import sys
import threading
import time
import traceback
import types
from dataclasses import replace
from typing import Any

import cloudpickle

from labkit.errors import Failure, text_of
from labkit.rank import cells, groups, output
from labkit.wire.parcel import Outcome, open_call

SIGNAL = signal.SIGRTMIN + 9
# Code that catches the interrupt and goes on gets it again, but not while it is still cleaning up.
AGAIN_AFTER_S = 0.3
MAX_FRAMES = 12

# Held by the agent while it frees the call that runs: one that began meanwhile would lose its own groups.
freeing = threading.Lock()
_running = 0
_name = ""
_since_s = 0.0
_upto = 0
_raised_s = 0.0
# While a cell runs, only its own code is interrupted, not IPython's machinery around it.
_inside: str | None = None
# A cell may show values that pass no stream.
_displays = False


def install() -> None:
    """Take the signal that interrupts the main thread; called once, in the main thread."""
    signal.signal(SIGNAL, _on_signal)
    sys.unraisablehook = _on_unraisable


def running() -> tuple[int, str, float]:
    """Number, name and start (monotonic seconds) of the call that runs; number 0 when the rank is idle."""
    return _running, _name, _since_s


def interrupt_upto(number: int) -> None:
    """End the call that runs if its number is at most `number`; called by the agent's thread."""
    global _upto
    _upto = max(_upto, number)


def must_free() -> bool:
    """Whether a call runs that was asked to end."""
    return 0 < _running <= _upto


def poke() -> None:
    """Send the main thread the interrupting signal (from the agent's thread)."""
    ident = threading.main_thread().ident
    if ident is not None:
        signal.pthread_kill(ident, SIGNAL)


def execute(number: int, name: str, packed: bytes) -> bytes:
    """Run one packed call; always returns a packed `Outcome`, whatever the call does short of ending the process."""
    global _running
    # Calls run inside the engine's event loop: hidden from them, so that `asyncio.run` and a top-level `await` work.
    loop = asyncio._get_running_loop()
    streams = sys.stdout, sys.stderr
    try:
        try:
            outcome = _execute(number, name, packed)
        finally:
            _running = 0
    except KeyboardInterrupt:  # the signal came between two lines of our own
        outcome = _interrupted(name)
    asyncio._set_running_loop(loop)
    sys.stdout, sys.stderr = streams  # the engine flushes them, whatever the call put there
    return replace(outcome, printed=_end(), intact=groups.intact()).dumps()


def run_cell(code: str) -> None:
    """Run the text of a notebook cell in this rank's namespace, as `%%px` does; a call like any other."""
    global _inside, _displays
    shell = cells.shell()
    _inside, _displays = "run_code", True
    try:
        result = shell.run_cell(code, store_history=True)
    finally:
        _inside = None
    if result.error_before_exec is not None:
        raise _CellError(result.error_before_exec)
    if result.error_in_exec is not None:
        raise _CellError(result.error_in_exec)


class _CellError(Exception):
    """Carries what a cell raised past IPython."""


def _execute(number: int, name: str, packed: bytes) -> Outcome:
    if number <= _upto:
        return _interrupted(name)
    _begin(number, name)
    try:
        shell = cells.shell()
        fn, args, kwargs = open_call(packed, shell.user_ns if shell is not None else {})
        asyncio._set_running_loop(None)
        value = fn(*args, **kwargs)
    except BaseException as error:
        return Outcome(failure=_told(error, interrupted=number <= _upto))
    return _pack(value)


def _pack(value: Any) -> Outcome:
    try:
        return Outcome(value=cloudpickle.dumps(value))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        text = f"the result of type {type(value).__name__} cannot be sent to the notebook ({error})"
        fix = "Return plain values, such as numbers, lists or tensors"
        return Outcome(failure=Failure(type=type(error).__name__, message=f"{text}. {fix}"))


def _begin(number: int, name: str) -> None:
    global _running, _name, _since_s, _raised_s
    _name, _since_s, _raised_s = name, time.monotonic(), 0.0
    output.begin_call()
    with freeing:
        _running = number


def _end() -> bool:
    """Close the account of the call's output; returns whether there was any."""
    global _displays
    displayed, _displays = _displays, False
    return output.end_call() or displayed


def _on_signal(signum: int, frame: types.FrameType | None) -> None:
    global _raised_s
    now = time.monotonic()
    if not must_free() or now - _raised_s < AGAIN_AFTER_S:
        return
    if frame is not None and frame.f_code is execute.__code__:
        return  # the call has ended: raised here, nothing would catch it, and the rank would end
    if _inside is not None and not _stands_in(frame, _inside):
        return
    _raised_s = now
    raise KeyboardInterrupt


def _on_unraisable(args: Any) -> None:
    """An interrupt that met a destructor is swallowed there, and comes again: nothing to tell."""
    if args.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(args)


def _stands_in(frame: types.FrameType | None, function: str) -> bool:
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def _interrupted(name: str) -> Outcome:
    return Outcome(failure=Failure(type="KeyboardInterrupt", message=f"{name} was interrupted", interrupted=True))


def _told(error: BaseException, *, interrupted: bool) -> Failure:
    """What was raised, also where it does as it likes when it is looked at."""
    try:
        return _failure(error, interrupted=interrupted)
    except BaseException as second:
        if isinstance(second, KeyboardInterrupt):
            raise
        return Failure(type=_type_name(error), message=f"(it cannot be looked at: {_type_name(second)})")


def _type_name(error: BaseException) -> str:
    """The name of its type, also of one that says another."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def _failure(error: BaseException, *, interrupted: bool) -> Failure:
    if isinstance(error, _CellError):
        error = error.args[0]
    frames = _own_frames(error.__traceback__)
    text = "".join(traceback.format_list(frames[-MAX_FRAMES:]))
    theirs = [one for one in frames if "site-packages" not in one.filename] or frames
    where = f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    if isinstance(error, SyntaxError) and not frames:  # of the cell itself
        text = "".join(traceback.format_exception_only(error)[:-1])
        where = f"{error.filename}:{error.lineno}"
    if (cause := error.__cause__) is not None:
        text += f"  caused by {type(cause).__name__}: {text_of(cause)}\n"
    if interrupted and isinstance(error, KeyboardInterrupt) and not error.args:
        error = KeyboardInterrupt(f"{_name} was interrupted")
    notes = getattr(error, "__notes__", None)
    message = "\n".join([text_of(error), *map(str, notes if isinstance(notes, list) else ())])
    return Failure(type=_type_name(error), message=message, traceback=text, where=where, interrupted=interrupted)


def _own_frames(trace: types.TracebackType | None) -> list[traceback.FrameSummary]:
    """The frames below ours: the caller's code and what it called."""
    ours = ("/labkit/rank/calls.py", "/labkit/rank/cells.py", "/labkit/wire/parcel.py")
    frames = [one for one in traceback.extract_tb(trace) if not one.filename.endswith(ours)]
    return [one for one in frames if "/IPython/core/" not in one.filename and not one.filename.startswith("<frozen ")]
