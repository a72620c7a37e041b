"""Pipeline schedules as values: what each rank does, in which order, written as `2F0`."""

from labkit.schedule.action import COMMUNICATION, COMPUTE, KINDS, Action, format_actions, parse, parse_actions
from labkit.schedule.schedules import BUILDERS, add_communication, build, gpipe, num_in_flight, one_f_one_b
from labkit.schedule.validate import check_order, dependencies, read, validate

__all__ = [
    "BUILDERS",
    "COMMUNICATION",
    "COMPUTE",
    "KINDS",
    "Action",
    "add_communication",
    "build",
    "check_order",
    "dependencies",
    "format_actions",
    "gpipe",
    "num_in_flight",
    "one_f_one_b",
    "parse",
    "parse_actions",
    "read",
    "validate",
]
