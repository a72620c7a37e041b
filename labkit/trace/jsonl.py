"""Events as JSON lines: a header that says what was run, then `[rank, kind, start_s, duration_s, ...]` a line."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from labkit.errors import LabError
from labkit.plan import Plan, build
from labkit.schedule import format_actions
from labkit.spec import Layout, Model, Pace
from labkit.spec.checks import shown
from labkit.trace.event import Event

__all__ = ["dump", "load"]

FORMAT = "labkit.trace.1"


def dump(events: Sequence[Event], origin: str, plan: Plan | None, pace: Pace | None, aligned: bool) -> str:
    """Return the JSON lines.

    >>> dump([], "measured", None, None, True).strip()
    '{"format": "labkit.trace.1", "origin": "measured", "model": null, "layout": null, "pace": null, "aligned": true}'
    """
    header: dict[str, object] = {
        "format": FORMAT,
        "origin": origin,
        "model": asdict(plan.model) if plan else None,
        "layout": str(plan.layout) if plan else None,
        "pace": asdict(pace) if pace else None,
        "aligned": aligned,
    }
    if plan and plan.schedule:
        header["schedule"] = format_actions(plan.actions)
    lines = [json.dumps(header), *(json.dumps([event.rank, *event.to_row()]) for event in events)]
    return "\n".join(lines) + "\n"


def load(text: str) -> tuple[list[Event], str, Plan | None, Pace | None, bool]:
    """Read what `dump` wrote: events, origin, plan, pace, aligned.

    Raises:
        LabError: another format, or a broken line, by number.

    >>> load(dump([Event(0, "F", 0.0, 1.0)], "measured", None, None, True))[0][0].kind
    'F'
    """
    given: object = text
    if not isinstance(given, str):
        raise LabError(f"{shown(given)} is no text: a trace is read from JSON lines, or from a pathlib.Path.")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise LabError("line 1 is missing: a trace starts with a header line.")
    header = _read(*lines[0])
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise LabError(f"line {lines[0][0]} is no header of {FORMAT}: {shown(lines[0][1])}.")
    events = []
    for number, line in lines[1:]:
        row = _read(number, line)
        if not isinstance(row, list) or not row:
            raise LabError(f"line {number} is no event: {shown(line)}.")
        try:
            events.append(Event.from_row(row[0], row[1:]))
        except LabError as error:
            raise LabError(f"line {number}: {error}") from None
    return events, *_header(header)


def _header(header: dict[str, object]) -> tuple[str, Plan | None, Pace | None, bool]:
    model, layout, pace = header.get("model"), header.get("layout"), header.get("pace")
    schedule = header.get("schedule")
    own = schedule if isinstance(schedule, str) else None
    try:
        plan = build(Model(**model), Layout.parse(str(layout)), own) if isinstance(model, dict) else None
        read_pace = Pace(**pace) if isinstance(pace, dict) else None
    except (LabError, TypeError) as error:
        raise LabError(f"line 1, the header, names what cannot be built: {error}") from None
    return str(header.get("origin")), plan, read_pace, header.get("aligned") is True


def _read(number: int, line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise LabError(f"line {number} is no JSON: {shown(line)}.") from None
