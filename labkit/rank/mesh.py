"""A layout's groups: one per axis, one of all members, and one that joins the two ends of a pipeline."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from labkit.errors import PlanError
from labkit.plan import AXES, Placement, Plan
from labkit.rank import groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A member rank's place in a layout and the groups it belongs to.

    Attributes:
        rank: the rank.
        place: its place on each axis.
        device_mesh: axes `pp`, `dp`, `tp`.
        members: all ranks of the layout; None where there is only one.
        ends: the first and last stage at this rank's dp and tp place, for a matrix that both hold; else None.
    """

    rank: int
    place: Placement
    device_mesh: DeviceMesh
    members: dist.ProcessGroup | None
    ends: dist.ProcessGroup | None

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's group on an axis."""
        return self.device_mesh.get_group(axis)


@dataclass(slots=True)
class _Built:
    generation: int = -1
    meshes: dict[tuple[int, ...], Mesh | None] = field(default_factory=dict)


_built = _Built()


def of(plan: Plan) -> Mesh | None:
    """Return this rank's mesh under a plan; None where the plan does without this rank.

    Groups of the same degrees are made once per generation of the world's group.

    Runs on: every rank of the world at once, member or not. Communicates: the rendezvous store, the first time.

    Raises:
        PlanError: the world has fewer ranks than the layout takes.
    """
    layout = plan.layout
    world_size = dist.get_world_size()
    if world_size < plan.world_size:
        raise PlanError(
            f"dp({layout.dp}) * pp({layout.pp}) * tp({layout.tp}) = {plan.world_size} but {world_size} ranks are up: "
            f"each rank has one place in the mesh. Start {plan.world_size} ranks or change an axis."
        )
    if _built.generation != groups.generation():
        _built.meshes.clear()
        forget_cached_meshes()
        _built.generation = groups.generation()
    is_tied = plan.model.tied_embeddings and layout.pp > 1
    key = (layout.pp, layout.dp, layout.tp, int(is_tied))
    if key not in _built.meshes:
        _built.meshes[key] = _build(plan, world_size, is_tied)
    return _built.meshes[key]


def _build(plan: Plan, world_size: int, is_tied: bool) -> Mesh | None:
    layout, size, rank = plan.layout, plan.world_size, dist.get_rank()
    ranks = torch.arange(size).view(layout.pp, layout.dp, layout.tp)
    device_mesh = DeviceMesh(groups.device().type, ranks, mesh_dim_names=AXES)
    members = dist.group.WORLD if size == world_size else dist.new_group(list(range(size)))
    ends = None
    if is_tied:
        for first, last in zip(ranks[0].flatten().tolist(), ranks[-1].flatten().tolist(), strict=True):
            pair = dist.new_group([first, last])
            ends = pair if rank in (first, last) else ends
    if rank >= size:
        return None
    return Mesh(
        rank=rank,
        place=plan.placement(rank),
        device_mesh=device_mesh,
        members=members if size > 1 else None,
        ends=ends,
    )


def forget_cached_meshes() -> None:
    """Drop the meshes that DTensor's cached rules hold: an equal mesh of an earlier generation has dead groups."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
