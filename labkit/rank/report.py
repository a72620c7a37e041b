"""What a rank tells the notebook while it works, and what the notebook asks of it.

The agent of the process installs itself here; without one (a bare process in a test) everything is a no-op.
"""

import threading
from collections.abc import Callable
from typing import Any

_sink: Callable[[str, dict[str, Any]], None] | None = None
_stop = threading.Event()


def install(sink: Callable[[str, dict[str, Any]], None] | None) -> None:
    """Send what `emit` gets to `sink(topic, message)` from now on (None: drop it)."""
    global _sink
    _sink = sink


def emit(topic: str, message: dict[str, Any]) -> None:
    """Queue a JSON-able message for the notebook; returns at once, never raises for a slow reader."""
    if _sink is not None:
        _sink(topic, message)


def request_stop() -> None:
    """Ask the running training loop to end after its step (called by the agent's thread)."""
    _stop.set()


def stop_requested() -> bool:
    """Whether somebody asked this rank to stop; every rank must agree before one leaves the loop."""
    return _stop.is_set()


def clear_stop() -> None:
    """Forget an earlier request: a new run starts."""
    _stop.clear()
