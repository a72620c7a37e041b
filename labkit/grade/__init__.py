"""Grading: `check` in the notebook, `labkit grade` for a class."""

import importlib
from typing import Any

# A notebook that checks an answer loads nothing of what grades a class, and the other way round.
_HOMES = {"check": "checking", "strip": "stripping", "grade_folder": "batch"}

__all__ = ["check", "grade_folder", "strip"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"labkit.grade.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'labkit.grade' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
