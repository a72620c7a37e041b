"""What a plan should take, before anything runs."""

from labkit.predict.collectives import COLLECTIVES, Reach, collective_time, reach
from labkit.predict.fitting import fitting
from labkit.predict.memory import CATEGORIES, Memories, Memory, memory
from labkit.predict.shares import Shares, shares
from labkit.predict.software import SOFTWARE, Software
from labkit.predict.states import state_bytes
from labkit.predict.step import step
from labkit.predict.timeline import bubble_fraction, timeline
from labkit.predict.traffic import INNER_TO_OUTER, Traffic, groups_in_order, num_hosts, ring_time, traffic

__all__ = [
    "CATEGORIES",
    "COLLECTIVES",
    "INNER_TO_OUTER",
    "SOFTWARE",
    "Memories",
    "Memory",
    "Reach",
    "Shares",
    "Software",
    "Traffic",
    "bubble_fraction",
    "collective_time",
    "fitting",
    "groups_in_order",
    "memory",
    "num_hosts",
    "reach",
    "ring_time",
    "shares",
    "state_bytes",
    "step",
    "timeline",
    "traffic",
]
