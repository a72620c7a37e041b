"""A layout's groups: one per axis, one of all members, and one that joins the two ends of a pipeline."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

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
        shards: what `fully_shard` takes: the dp axis, or with hybrid sharding replicas x shards.
        members: all ranks of the layout; None where there is only one.
        ends: who holds the first and the last stage at this rank's dp and tp place, for a matrix that both hold; None
            without such a matrix, or where one rank holds both.
    """

    rank: int
    place: Placement
    device_mesh: DeviceMesh
    shards: DeviceMesh
    members: dist.ProcessGroup | None
    ends: dist.ProcessGroup | None

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's group on an axis."""
        return self.device_mesh.get_group(axis)


# By degrees; of the present groups.
_built: dict[tuple[int, ...], "Mesh | None"] = {}


def of(plan: Plan) -> Mesh | None:
    """Return this rank's mesh under a plan; None where the plan does without this rank.

    Groups of the same degrees are made once, until the world's group is built anew.

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
    outer = {plan.pp_rank_of(0), plan.pp_rank_of(plan.num_stages - 1)} if plan.has_twin else set()
    ends = tuple(sorted(outer)) if len(outer) == 2 else ()
    key = (layout.pp, layout.dp, layout.tp, layout.hybrid, *ends)
    if key not in _built:
        _built[key] = _build(plan, world_size, ends)
    return _built[key]


def _build(plan: Plan, world_size: int, end_places: tuple[int, ...]) -> Mesh | None:
    layout, size, rank = plan.layout, plan.world_size, dist.get_rank()
    ranks = torch.arange(size).view(layout.pp, layout.dp, layout.tp)
    device_mesh = DeviceMesh(groups.device().type, ranks, mesh_dim_names=AXES)
    split = device_mesh
    if layout.hybrid > 1:
        split = device_mesh._unflatten("dp", (layout.hybrid, layout.dp // layout.hybrid), ("replicas", "shards"))
    members = dist.group.WORLD if size == world_size else dist.new_group(list(range(size)))
    ends = None
    if end_places:
        for first, last in zip(*(ranks[place].flatten().tolist() for place in end_places), strict=True):
            pair = dist.new_group([first, last])
            ends = pair if rank in (first, last) else ends
    if rank >= size:
        return None
    return Mesh(
        rank=rank,
        place=plan.placement(rank),
        device_mesh=device_mesh,
        shards=split["replicas", "shards"] if layout.hybrid > 1 else split["dp"],
        members=members if size > 1 else None,
        ends=ends,
    )


def forget() -> None:
    """Drop every mesh, also those that DTensor's caches hold: their groups are dead, and an equal mesh would find them.

    These are all caches of torch.distributed.tensor that hold a mesh (torch 2.13; 2.11 and 2.12 lack some).
    """
    _built.clear()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    planners = getattr(_redistribute, "_planner_cache", None)
    if planners is not None:
        planners.clear()


groups.on_tear_down(forget)
