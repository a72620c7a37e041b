"""A pipeline schedule that someone wrote, read and checked before any rank sees it."""

from collections.abc import Sequence

from labkit.errors import PlanError
from labkit.schedule import COMPUTE, Action, parse, parse_actions, validate
from labkit.spec import Layout
from labkit.spec.checks import shown

__all__ = ["Schedule", "read_own"]

Schedule = str | Sequence[Sequence[Action]] | Sequence[Sequence[str]]
"""Text with one line per pp rank, or one list per pp rank of actions or of their texts."""


def read_own(schedule: Schedule | None, layout: Layout) -> tuple[tuple[Action, ...], ...] | None:
    """Read a schedule for a layout whose schedule is "own"; None for another layout.

    Raises:
        PlanError: there is none where the layout says "own", it has other sizes than the layout, holds sends or
            receives, or is incomplete or waits for ever (`labkit.schedule.validate`).

    >>> read_own([["0F0", "0B0"], ["1F0", "1B0"]], Layout.parse("pp2 own m1"))[1]
    (Action(stage=1, kind='F', microbatch=0), Action(stage=1, kind='B', microbatch=0))
    """
    if schedule is None:
        if layout.schedule == "own":
            raise PlanError(
                "schedule='own' without one: it is given as text. Use labkit.plan.build(model, layout, schedule=text)."
            )
        return None
    lines = _lines(schedule)
    _check_computations(lines)
    _check_sizes(lines, layout)
    validate(lines, layout.num_stages, layout.num_microbatches)
    for pp_rank, line in enumerate(lines):
        stages = sorted({action.stage for action in line})
        if len(stages) != layout.num_virtual_stages:
            raise PlanError(
                f"line {pp_rank} of the schedule holds {_count(len(stages), 'stage')} {stages} but "
                f"num_virtual_stages={layout.num_virtual_stages}: every rank holds as many. Move a stage."
            )
    return tuple(tuple(line) for line in lines)


def _lines(schedule: object) -> list[list[Action]]:
    if isinstance(schedule, str):
        return parse_actions(schedule)
    if not isinstance(schedule, list | tuple) or not all(isinstance(line, list | tuple) for line in schedule):
        raise PlanError(
            f"schedule {shown(schedule)} is neither text nor a list per rank: write one line of actions per rank."
        )
    return [[each if isinstance(each, Action) else parse(each) for each in line] for line in schedule]


def _check_computations(lines: Sequence[Sequence[Action]]) -> None:
    for pp_rank, line in enumerate(lines):
        for action in line:
            if action.kind not in COMPUTE:
                raise PlanError(
                    f"line {pp_rank} of the schedule holds {action}: ranks add sends and receives by themselves. "
                    f"Leave it out."
                )


def _check_sizes(lines: Sequence[Sequence[Action]], layout: Layout) -> None:
    if len(lines) != layout.pp:
        raise PlanError(
            f"the schedule has {_count(len(lines), 'line')} but pp={layout.pp}: it has one line for each pp rank. "
            f"Use pp{len(lines)}."
        )
    actions = [action for line in lines for action in line]
    num_stages = 1 + max((action.stage for action in actions), default=0)
    if num_stages != layout.num_stages:
        fix = f"Use v{num_stages // layout.pp}." if num_stages % layout.pp == 0 else "Every rank holds as many."
        raise PlanError(
            f"the schedule has {_count(num_stages, 'stage')} but pp={layout.pp} * "
            f"num_virtual_stages={layout.num_virtual_stages} = {layout.num_stages}: the layout says how many. {fix}"
        )
    num_microbatches = 1 + max((action.microbatch for action in actions), default=0)
    if num_microbatches != layout.num_microbatches:
        raise PlanError(
            f"the schedule has {_count(num_microbatches, 'micro-batch')} but "
            f"num_microbatches={layout.num_microbatches}: the layout says how many. Use m{num_microbatches}."
        )


def _count(number: int, thing: str) -> str:
    ending = "" if number == 1 else "es" if thing.endswith("ch") else "s"
    return f"{number} {thing}{ending}"
