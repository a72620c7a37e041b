"""Pipeline schedules as values: what each rank does, in which order, written as `2F0`."""

from labkit.schedule.action import COMMUNICATION, COMPUTE, KINDS, Action, format_actions, parse, parse_actions
from labkit.schedule.interleaved import interleaved, interleaved_zero_bubble, looped_bfs
from labkit.schedule.schedules import (
    BUILDERS,
    INTERLEAVED,
    V_SHAPED,
    add_communication,
    build,
    check_virtual_stages,
    gpipe,
    num_in_flight,
    one_f_one_b,
    stages_of,
)
from labkit.schedule.v_shaped import dualpipe_v, zbv
from labkit.schedule.validate import check_order, dependencies, inputs, read, validate

__all__ = [
    "BUILDERS",
    "COMMUNICATION",
    "COMPUTE",
    "INTERLEAVED",
    "KINDS",
    "V_SHAPED",
    "Action",
    "add_communication",
    "build",
    "check_order",
    "check_virtual_stages",
    "dependencies",
    "dualpipe_v",
    "format_actions",
    "gpipe",
    "inputs",
    "interleaved",
    "interleaved_zero_bubble",
    "looped_bfs",
    "num_in_flight",
    "one_f_one_b",
    "parse",
    "parse_actions",
    "read",
    "stages_of",
    "validate",
    "zbv",
]
