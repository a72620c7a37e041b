"""Trials of an all-reduce that was written by hand from sends and receives, and of what it is said to cost."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.rank.trials.attempt import as_plain, device, has_numbers
from labkit.rank.trials.traffic import Traffic

__all__ = ["BLOCK", "all_reduce", "costs", "numbers"]

# Longer results come back as two sums per so many numbers.
BLOCK = 4096


def numbers(rank: int, size: int, seed: int) -> torch.Tensor:
    """The `size` numbers that a member brings: small integers, so that every order of adding gives the same bits."""
    return ((torch.arange(size, dtype=torch.int64) * 7 + rank * 13 + seed) % 19 - 9).to(torch.float32)


def all_reduce(
    answers: Mapping[str, Callable[..., Any]], group: dist.ProcessGroup, *, answer: str, size: int, seed: int
) -> dict[str, Any]:
    """Have the answer add up one tensor of each member; returns its result and what it sent and received, in order.

    Runs on: every member. Communicates: what the answer does. Shapes: `[size]` in and out.
    """
    x = numbers(dist.get_rank(group), size, seed).to(device())
    with Traffic() as traffic:
        result = answers[answer](x, group)
    return {"result": _compact(result, size), "calls": traffic.calls}


def costs(
    answers: Mapping[str, Callable[..., Any]],
    group: dist.ProcessGroup,
    *,
    answer: str,
    questions: Sequence[Sequence[float]],
) -> list[Any]:
    """What a function of plain numbers answers to each question; what is no number and no text comes as its type.

    Runs on: every member, the same. Communicates: nothing.
    """
    return [_plain(answers[answer](*question)) for question in questions]


def _compact(result: Any, size: int) -> dict[str, Any]:
    """A long result as `blocks`: the sum of each `BLOCK` numbers, and their sum weighted by the place in the block.

    One of another shape than `[size]` is wrong in any case, and may be of any length: its numbers are not looked at.
    """
    is_tensor = type(result) in (torch.Tensor, torch.nn.Parameter)
    if not is_tensor or size <= BLOCK or list(result.shape) != [size] or not has_numbers(result):
        return as_plain(result)
    values = result.detach().to("cpu", torch.float64).flatten()
    padded = torch.zeros(-(-len(values) // BLOCK) * BLOCK, dtype=torch.float64)
    padded[: len(values)] = values
    blocks = padded.view(-1, BLOCK)
    weights = torch.arange(1, BLOCK + 1, dtype=torch.float64)
    return {
        "type": "Tensor",
        "shape": list(result.shape),
        "dtype": str(result.dtype).removeprefix("torch."),
        "blocks": [blocks.sum(1).tolist(), (blocks @ weights).tolist()],
    }


def _plain(value: Any) -> Any:
    if type(value) is str:
        return value[:40]
    if type(value) in (int, float) and math.isfinite(value):
        return float(value)
    return {"type": type(value).__name__ if type(value) is not float else str(value)}
