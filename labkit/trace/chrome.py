"""Events as Chrome trace JSON, which chrome://tracing and Perfetto open."""

import json
from collections.abc import Sequence

from labkit.schedule import COMMUNICATION, COMPUTE
from labkit.trace.event import COLLECTIVES, Event

__all__ = ["dump"]

_LANES = ("step", "compute", "pipeline", "collectives", "other")


def dump(events: Sequence[Event]) -> str:
    """Return the JSON text: process = rank, one thread per lane, times in microseconds from the first event.

    The format: "Trace Event Format", Google, 2016 ("X" complete events, "C" counters, "M" names).

    >>> json.loads(dump([Event(3, "F", 1.0, 0.5, stage=0, microbatch=2)]))["traceEvents"][-1]["name"]
    '0F2'
    """
    start_s = min((event.start_s for event in events), default=0.0)
    records = [record for rank in sorted({event.rank for event in events}) for record in _names(rank)]
    records += [_record(event, start_s) for event in events]
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})


def _names(rank: int) -> list[dict[str, object]]:
    process: dict[str, object] = {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    order: dict[str, object] = {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
    lanes: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(_LANES)
    ]
    return [process, order, *lanes]


def _record(event: Event, start_s: float) -> dict[str, object]:
    at_us = (event.start_s - start_s) * 1e6
    common: dict[str, object] = {"pid": event.rank, "tid": _lane(event.kind), "ts": at_us}
    if event.kind == "memory":
        return common | {"name": "memory", "ph": "C", "args": {"bytes": event.num_bytes or 0}}
    names = ("step", "stage", "microbatch", "group", "seq", "num_bytes", "peer")
    args = {name: value for name in names if (value := getattr(event, name)) is not None}
    return common | {"name": event.label, "cat": event.kind, "ph": "X", "dur": event.duration_s * 1e6, "args": args}


def _lane(kind: str) -> int:
    groups = (("step",), COMPUTE, COMMUNICATION, COLLECTIVES)
    return next((lane for lane, kinds in enumerate(groups) if kind in kinds), len(groups))
