"""Trials of a cast to FP8 under delayed scaling: tensors in, step by step, and what was cast and by which scale."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.rank.trials.attempt import as_plain, device, has_numbers
from labkit.rank.trials.traffic import Traffic

__all__ = ["DTYPES", "delayed_cast"]

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def delayed_cast(
    answers: Mapping[str, Callable[..., Any]],
    group: dist.ProcessGroup,
    *,
    steps: Sequence[Sequence[Sequence[float]]],
    shape: Sequence[int],
    recipe: Mapping[str, Any],
) -> dict[str, Any]:
    """Have the answer cast this member's tensor of each step; returns what came back, and the communication.

    Runs on: every member. Communicates: what the answer does. Shapes: `steps` is [num_steps][members][numbers].
    """
    (answer,) = answers.values()
    state: dict[str, Any] = {}
    told = []
    for values in steps:
        x = torch.tensor(values[dist.get_rank(group)], dtype=torch.float32, device=device()).view(*shape)
        with Traffic() as traffic:
            result = answer(x, state, group, {**recipe, "dtype": DTYPES[recipe["dtype"]]})
        told.append({**_plain(result), "calls": traffic.calls})
    return {"steps": told}


def _plain(result: Any) -> dict[str, Any]:
    """A pair of a tensor and a scale as plain data under "cast" and "scale", or under "type" what it is instead."""
    if type(result) not in (tuple, list) or len(result) != 2:
        length = f" of {len(result)}" if type(result) in (tuple, list) else ""
        return {"type": f"{type(result).__name__}{length}"}
    cast, scale = result
    return {"cast": as_plain(cast), "scale": _number(scale)}


def _number(value: Any) -> Any:
    """A number, or a tensor that holds one, as a float; anything else as plain data that says what it is."""
    if type(value) in (int, float):
        return float(value)
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() == 1 and has_numbers(value):
        return float(value.detach().to("cpu", torch.float64))
    return as_plain(value)
