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
from labkit.rank.mesh import Mesh
from labkit.spec import Training

# On rank 0 alone: by the reference's name, the whole weights after each of its steps, in host memory.
_kept: dict[str, list[dict[str, Tensor]]] = {}


def keep(name: str, plan: Plan, settings: Training) -> dict[str, Any] | None:
    """Train one rank and keep its weights after every step under a name, to compare layouts with.

    Runs on: every rank of the world at once.

    Returns:
        On rank 0 "losses" and "grad_norms" (one a step); None elsewhere.

    Raises:
        PlanError, LabError: as `training.train`.
    """
    result, snapshots = _steps(plan, settings, lambda step, weights: _copies(weights))
    if result is not None:
        _kept[name] = snapshots
    return result


def compare(name: str, plan: Plan, settings: Training) -> dict[str, Any] | None:
    """Train under a plan and compare with the reference of that name.

    Every rank's copy counts: a replica that went its own way is found.

    Runs on: every rank of the world at once. Communicates: what training does; after each step the gathering of all
    weights, their broadcast from rank 0, and one all-reduce.

    Returns:
        On rank 0 "losses", "grad_norms" and "weights": for each step, by parameter, the largest difference of an
        element on any rank. None elsewhere.

    Raises:
        PlanError: no such reference, or as `training.train`. LabError: as `training.train`.
    """
    is_first = dist.get_rank() == 0
    if is_first and name not in _kept:
        raise PlanError(f"rank 0 keeps no reference {name!r}: its process is a new one. Run lk.launch.parity again.")
    result, found = _steps(plan, settings, lambda step, weights: _differences(name, step, weights, mesh.of(plan)))
    return result | {"weights": found} if result is not None and is_first else None


def forget() -> None:
    """Drop all references, and the live state that the last comparison left."""
    _kept.clear()
    state.end("lk.launch.parity compared layouts on these ranks and leaves none")


def _steps(
    plan: Plan, settings: Training, after: Callable[[int, dict[str, Tensor]], Any]
) -> tuple[dict[str, Any] | None, list[Any]]:
    """Train in runs of one step each; `after(step, weights)` is called between them on the layout's ranks."""
    losses: list[float] = []
    norms: list[float] = []
    found = []
    for step in range(settings.num_steps):
        one = replace(settings, num_steps=1, start="live" if step else "fresh", trace=False)
        result = training.train(plan, one)
        if result is not None:
            losses += result["losses"]
            norms += result["grad_norms"]
            found.append(after(step, training.gather_weights()))
    return ({"losses": losses, "grad_norms": norms} if losses else None), found


def _copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}


def _differences(name: str, step: int, weights: dict[str, Tensor], own: Mesh | None) -> dict[str, float]:
    members = None if own is None else own.members
    found = []
    for parameter, tensor in weights.items():
        wanted = _kept[name][step][parameter].to(tensor) if dist.get_rank() == 0 else torch.empty_like(tensor)
        if members is not None:
            dist.broadcast(wanted, src=0, group=members)
        found.append((tensor - wanted).abs().max())
    largest = torch.nan_to_num(torch.stack(found), nan=torch.inf)
    if members is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=members)
    return dict(zip(weights, largest.tolist(), strict=True))
