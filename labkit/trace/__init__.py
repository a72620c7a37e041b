"""Events and traces: one record for predicted and measured runs."""

from labkit.trace.event import COLLECTIVES, KINDS, OTHERS, Event
from labkit.trace.fp8 import Fp8Cast, Fp8Record
from labkit.trace.lazy import LazyTrace, StepTotals
from labkit.trace.trace import ORIGINS, Trace

__all__ = [
    "COLLECTIVES",
    "KINDS",
    "ORIGINS",
    "OTHERS",
    "Event",
    "Fp8Cast",
    "Fp8Record",
    "LazyTrace",
    "StepTotals",
    "Trace",
]
