"""Pictures of values: a trace, losses, grades or comparisons in, a plotly figure out. No process, no torch."""

from labkit.show.bits import bits, ranges
from labkit.show.bubbles import bubbles
from labkit.show.compared import compared
from labkit.show.fp8 import fp8
from labkit.show.grades import grade_criteria, grade_statuses, grade_times, grade_totals
from labkit.show.hosts import hosts
from labkit.show.losses import losses
from labkit.show.matrix import parity
from labkit.show.memory import memory
from labkit.show.overlay import overlay
from labkit.show.ring import ring
from labkit.show.shares import shares
from labkit.show.stacked import stacked
from labkit.show.switch import switch
from labkit.show.timeline import timeline

__all__ = [
    "bits",
    "bubbles",
    "compared",
    "fp8",
    "grade_criteria",
    "grade_statuses",
    "grade_times",
    "grade_totals",
    "hosts",
    "losses",
    "memory",
    "overlay",
    "parity",
    "ranges",
    "ring",
    "shares",
    "stacked",
    "switch",
    "timeline",
]
