"""What a plan should take, before anything runs."""

from labkit.predict.shares import Shares, shares
from labkit.predict.states import state_bytes
from labkit.predict.timeline import bubble_fraction, timeline
from labkit.predict.traffic import INNER_TO_OUTER, Traffic, groups_in_order, num_hosts, ring_time, traffic

__all__ = [
    "INNER_TO_OUTER",
    "Shares",
    "Traffic",
    "bubble_fraction",
    "groups_in_order",
    "num_hosts",
    "ring_time",
    "shares",
    "state_bytes",
    "timeline",
    "traffic",
]
