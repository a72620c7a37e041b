"""Trains a layout step by step and says how far its weights are from one rank's: the ranks' part of `launch.parity`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.rank import mesh, state, training
from labkit.spec import Training

# On rank 0 alone: by the reference's name, the whole weights after every step, in host memory.
_kept: dict[str, dict[int, dict[str, Tensor]]] = {}


def keep(name: str, plan: Plan, settings: Training) -> dict[str, Any] | None:
    """Train one rank and keep its weights after every step under a name, to compare layouts with.

    Runs on: every rank of the world at once.

    Returns:
        On rank 0 "losses" and "grad_norms" (one a step); None elsewhere.

    Raises:
        PlanError, LabError: as `training.train`.
    """
    result, snapshots = _train(plan, settings, 1, lambda step, weights: _copies(weights))
    if result is not None:
        _kept[name] = snapshots
    return result


def compare(name: str, plan: Plan, settings: Training, every_step: bool) -> dict[str, Any] | None:
    """Train under a plan and compare with the reference of that name.

    Every rank's copy of the weights counts: a replica that went its own way is found.

    Runs on: every rank of the world at once. Communicates: what training does; after the last step (or every step) the
    gathering of all weights, one broadcast of them from rank 0, and one all-reduce.

    Returns:
        On rank 0 "losses", "grad_norms" (one a step) and "weights": by step that was looked at, by parameter, the
        largest difference of an element on any rank. None elsewhere.

    Raises:
        PlanError: no such reference, or as `training.train`. LabError: as `training.train`.
    """
    is_first = dist.get_rank() == 0
    if is_first and name not in _kept:
        raise PlanError(f"rank 0 keeps no reference {name!r}: its process is a new one. Run lk.launch.parity again.")
    num_each = 1 if every_step else settings.num_steps
    result, found = _train(plan, settings, num_each, lambda step, weights: _differences(name, step, weights, plan))
    return result | {"weights": found} if result is not None and is_first else None


def forget() -> None:
    """Drop all references, and the live state that the last comparison left."""
    _kept.clear()
    state.end("lk.launch.parity compared layouts on these ranks and leaves none")


def _train(
    plan: Plan, settings: Training, num_each: int, look: Callable[[int, dict[str, Tensor]], Any]
) -> tuple[dict[str, Any] | None, dict[int, Any]]:
    """Train in runs of `num_each` steps; on the layout's ranks, `look(step, weights)` after each run's last step."""
    losses: list[float] = []
    norms: list[float] = []
    found = {}
    for first in range(0, settings.num_steps, num_each):
        part = replace(settings, num_steps=num_each, start="live" if first else "fresh", trace=False)
        result = training.train(plan, part)
        if result is not None:
            losses += result["losses"]
            norms += result["grad_norms"]
            step = first + num_each - 1
            found[step] = look(step, training.gather_weights())
    return ({"losses": losses, "grad_norms": norms} if losses else None), found


def _copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}


def _differences(name: str, step: int, weights: dict[str, Tensor], plan: Plan) -> dict[str, float]:
    """By parameter, the largest difference of an element on any of the layout's ranks."""
    own = mesh.of(plan)
    members = None if own is None else own.members
    flat = torch.cat([tensor.flatten() for tensor in weights.values()])
    wanted = torch.empty_like(flat)
    if dist.get_rank() == 0:
        kept = _kept[name][step]
        wanted.copy_(torch.cat([kept[parameter].flatten() for parameter in weights]))
    if members is not None:
        dist.broadcast(wanted, src=0, group=members)
    parts = (flat - wanted).abs().split([tensor.numel() for tensor in weights.values()])
    largest = torch.nan_to_num(torch.stack([part.max() for part in parts]), nan=torch.inf)
    if members is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=members)
    return dict(zip(weights, largest.tolist(), strict=True))
