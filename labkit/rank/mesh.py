"""A layout's groups: one per axis, one of all members, and one that joins the two ends of a pipeline."""

import math
from collections.abc import Iterable, Sequence
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
        groups: this rank's group on each axis.
        device_mesh: axes `pp`, `dp`, `tp`; with hybrid sharding dp is split into `replicas` and `shards`.
        shards: what `fully_shard` takes: the dp axis, or with hybrid sharding replicas x shards.
        members: all ranks of the layout; None where there is only one.
        ends: who holds the first and the last stage at this rank's dp and tp place, for a matrix that both hold; None
            without such a matrix, or where one rank holds both.
    """

    rank: int
    place: Placement
    groups: dict[str, dist.ProcessGroup]
    device_mesh: DeviceMesh
    shards: DeviceMesh
    members: dist.ProcessGroup | None
    ends: dist.ProcessGroup | None

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's group on an axis."""
        return self.groups[axis]


# By axis and ranks, None on ranks outside. To torch, meshes of equal ranks and names are equal, whatever their groups
# are, and DTensor's caches give one for the other: so such meshes have the same groups, in all layouts.
_groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}
# By degrees.
_meshes: dict[tuple[int, ...], Mesh | None] = {}


def of(plan: Plan) -> Mesh | None:
    """Return this rank's mesh under a plan; None where the plan does without this rank.

    Groups of the same ranks are made once for each axis, until the world's group is built anew.

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
    if key not in _meshes:
        _meshes[key] = _build(plan, ends)
    return _meshes[key]


def _build(plan: Plan, end_places: tuple[int, ...]) -> Mesh | None:
    layout, size, rank = plan.layout, plan.world_size, dist.get_rank()
    degrees = dict(zip(AXES, (layout.pp, layout.dp, layout.tp), strict=True))
    axes = _along(degrees)
    shards_over: tuple[str, ...] = ("dp",)
    if layout.hybrid > 1:
        shards_over = ("replicas", "shards")
        degrees = {"pp": layout.pp, "replicas": layout.hybrid, "shards": layout.dp // layout.hybrid, "tp": layout.tp}
        axes |= _along(degrees)
    members = _group("members", range(size)) if 1 < size < dist.get_world_size() else dist.group.WORLD
    ends = _ends(plan, end_places)
    if rank >= size:
        return None
    own = {axis: group for axis, group in axes.items() if group is not None}
    device_mesh = DeviceMesh.from_group(
        [own[axis] for axis in degrees],
        groups.device().type,
        torch.arange(size).view(*degrees.values()),
        mesh_dim_names=tuple(degrees),
    )
    return Mesh(
        rank=rank,
        place=plan.placement(rank),
        groups=own,
        device_mesh=device_mesh,
        shards=device_mesh[shards_over],
        members=members if size > 1 else None,
        ends=ends,
    )


def _along(degrees: dict[str, int]) -> dict[str, dist.ProcessGroup | None]:
    """This rank's group along every axis."""
    ranks = torch.arange(math.prod(degrees.values())).view(*degrees.values())
    found: dict[str, dist.ProcessGroup | None] = {}
    for place, (axis, degree) in enumerate(degrees.items()):
        lines = ranks.movedim(place, -1).reshape(-1, degree).tolist()
        found[axis] = _own_group(axis, lines)
    return found


def _ends(plan: Plan, places: tuple[int, ...]) -> dist.ProcessGroup | None:
    if not places:
        return None
    ranks = torch.arange(plan.world_size).view(plan.layout.pp, -1)
    pairs = zip(*(ranks[place].tolist() for place in places), strict=True)
    return _own_group("ends", pairs)


def _own_group(axis: str, lines: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
    """This rank's group among those of an axis; all ranks make all of them, in one order."""
    made = [_group(axis, line) for line in lines]
    return next((group for group in made if group is not None), None)


def _group(axis: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of these ranks; None on the others, which help to make it."""
    key = axis, tuple(ranks)
    if key not in _groups:
        made = dist.new_group(list(ranks))
        _groups[key] = made if dist.get_rank() in ranks else None
    return _groups[key]


def forget() -> None:
    """Drop every mesh, also those that DTensor's caches hold: their groups are dead, and an equal mesh would find them.

    These are all caches of torch.distributed.tensor that hold a mesh (torch 2.13; 2.11 and 2.12 lack some).
    """
    _meshes.clear()
    _groups.clear()
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    of_shapes = getattr(propagator, "_propagate_tensor_meta_cached", None)
    if of_shapes is not None:
        of_shapes.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    planners = getattr(_redistribute, "_planner_cache", None)
    if planners is not None:
        planners.clear()


groups.on_tear_down(forget)
