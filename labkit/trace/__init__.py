"""Events and traces: one record for predicted and measured runs."""

from labkit.trace.event import COLLECTIVES, KINDS, OTHERS, Event
from labkit.trace.trace import ORIGINS, Trace

__all__ = ["COLLECTIVES", "KINDS", "ORIGINS", "OTHERS", "Event", "Trace"]
