"""Ranks as processes: start, run, interrupt, kill, restart. Only this package knows ipyparallel's engines."""

import importlib
from typing import Any

_HOMES = {"start": "starting", "Ranks": "ranks", "Call": "call"}

__all__ = ["Call", "Ranks", "start"]


def __getattr__(name: str) -> Any:
    # Lazy: the keeper and the ranks run modules of this package without the notebook's half of it.
    if name in _HOMES:
        return getattr(importlib.import_module(f"labkit.cluster.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'labkit.cluster' has no attribute {name!r}")
