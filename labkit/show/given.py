"""What a picture is asked to draw: a trace, or a run, which has one."""

from typing import Protocol

from labkit.errors import PlanError
from labkit.trace import Trace


class HasTrace(Protocol):
    """A run, as far as pictures of traces are concerned."""

    @property
    def trace(self) -> Trace:
        """What every rank did."""


def trace_of(given: Trace | HasTrace) -> Trace:
    """The trace itself, or that of a run.

    Raises:
        PlanError: it is neither.
    """
    found = given if isinstance(given, Trace) else getattr(given, "trace", None)
    if not isinstance(found, Trace):
        raise PlanError(
            f"a {type(given).__name__} is no trace: pictures draw what ranks did. "
            "Give a run, run.trace, or what lk.predict.timeline returned."
        )
    return found
