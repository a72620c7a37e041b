"""Trials of an all-reduce that was written by hand from sends and receives."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit.rank.trials.attempt import as_plain, device
from labkit.rank.trials.traffic import Traffic

__all__ = ["all_reduce", "numbers"]


def numbers(rank: int, size: int, seed: int) -> torch.Tensor:
    """The `size` numbers that a member brings: small integers, so that every order of adding gives the same bits."""
    return ((torch.arange(size, dtype=torch.int64) * 7 + rank * 13 + seed) % 19 - 9).to(torch.float32)


def all_reduce(
    answers: Mapping[str, Callable[..., Any]], group: dist.ProcessGroup, *, size: int, seed: int
) -> dict[str, Any]:
    """Have the answer add up one tensor of each member; returns its result and what it sent.

    Runs on: every member. Communicates: what the answer does. Shapes: `[size]` in and out.
    """
    (answer,) = answers.values()
    x = numbers(dist.get_rank(group), size, seed).to(device())
    with Traffic() as traffic:
        result = answer(x, group)
    return {"result": as_plain(result), "calls": traffic.calls}
