"""Tries an answer on the members of a group and returns what it did as JSON text, whatever the answer returned."""

import __future__

import ast
import asyncio
import functools
import inspect
import json
import linecache
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.rank import groups
from labkit.rank.trials.undoing import undone
from labkit.wire.parcel import resolve

__all__ = ["as_plain", "attempt", "device", "end_together", "has_numbers"]

MAX_NUMBERS = 200_000
MAX_NAME_CHARS = 80
_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, one).compiler_flag for one in __future__.all_feature_names)
)
GROUPS_GONE = "the process group of all ranks was destroyed: other code needs it. Leave groups as they are"


def attempt(
    *,
    functions: Mapping[str, Callable[..., Any]],
    cells: Sequence[tuple[str, str]],
    names: Sequence[str],
    trial: str,
    members: Sequence[int],
    inputs: Mapping[str, Any],
) -> str | None:
    """Run one trial on the members of a group of its own, made for it and gone after it.

    Runs on: every rank of the world. Communicates: makes groups; the members run the trial and meet at the end.

    Args:
        functions: the answers as functions of the notebook; empty when `cells` bring them.
        cells: name and source of cells that define the answers, run in order in a namespace of their own.
        names: the names of the answers.
        trial: the dotted name of `trial(answers, group, **inputs)`, which returns plain data.
        members: the ranks of the group, in group order.
        inputs: keyword arguments of the trial.

    Returns:
        JSON: `{"value": what the trial returned}`, or `{"missing": [names]}`; None on a rank that is no member.
    """
    # Members come in any order, and the first is member 0. What is left unmatched in their group disturbs no meeting.
    group, meeting = dist.new_group(list(members), sort_ranks=False), dist.new_group(list(members))
    if dist.get_rank() not in members:
        return None
    with undone():
        # `torch.compile` leaves functions as they are: what is counted is the answer, not how long a compiler takes.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        answers = dict(functions) or _define(cells)
        told: dict[str, Any] = {"missing": [name for name in names if not callable(answers.get(name))]}
        if not told["missing"]:
            told = {"value": resolve(trial)({name: answers[name] for name in names}, group, **inputs)}
    if not groups.intact():
        raise RuntimeError(GROUPS_GONE)
    end_together(meeting)
    for one in (group, meeting):
        if one in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(one)
    return json.dumps(told)


def end_together(meeting: dist.ProcessGroup) -> None:
    """Wait until every member has finished: a group that one of them leaves early would fail on the others."""
    dist.barrier(meeting)


def as_plain(value: Any) -> dict[str, Any]:
    """What an answer returned, as plain data: a tensor with type, shape and numbers, anything else by its type's name.

    Only a true `torch.Tensor` gives numbers: an object that claims to equal everything gives its name.
    """
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return {"type": _name(type(value))}
    plain = {"type": "Tensor", "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if value.numel() <= MAX_NUMBERS and has_numbers(value):
        plain["values"] = value.detach().to("cpu", torch.float64).flatten().tolist()
    return plain


def has_numbers(value: torch.Tensor) -> bool:
    """Whether a tensor is one whose numbers can be read as they are: dense, real, and there."""
    strided = value.layout is torch.strided and not value.is_nested and not value.is_quantized
    return strided and not (value.is_meta or value.is_complex())


def _name(kind: type) -> str:
    """The name of a type, also of one that says another."""
    return str(type.__dict__["__name__"].__get__(kind))[:MAX_NAME_CHARS]


def device() -> torch.device:
    """Where the inputs of a trial live."""
    return groups.device()


def _define(cells: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Run cells in a new namespace that calls itself `__main__`, with `await` and `__future__` as in a notebook."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for name, source in cells:
        _show_lines(name, source)
        code = compile(source, name, "exec", flags, dont_inherit=True)
        flags |= code.co_flags & _FUTURE
        waits = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(waits)
    return namespace


@functools.cache
def _show_lines(name: str, source: str) -> None:
    """Let tracebacks show the lines of a cell."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
