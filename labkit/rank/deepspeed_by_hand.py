"""DeepSpeed as a learner's code calls it: in the world of all ranks, or in a group that is taken for the world."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from labkit.rank import deepspeed_library

__all__ = ["call", "world_of"]


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function that trains with DeepSpeed, without what that says on machines without GPUs.

    `ranks.run("labkit.rank.deepspeed_by_hand:call", function, ...)` returns what the function returns. What it prints
    is not seen, and the groups of engines that it makes end with it.
    """
    deepspeed_library.load()
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("this rank is in no process group: only ranks of the lab call this.")
    with world_of(world), deepspeed_library.quiet():
        return function(*arguments, **options)


@contextlib.contextmanager
def world_of(group: dist.ProcessGroup) -> Iterator[None]:
    """Have torch.distributed and DeepSpeed take a group for the world, and everything back on the way out.

    Runs on: every member of the group, with DeepSpeed loaded. Groups that are made inside end with it. Ranks meet under
    names that all count alike, and whoever is no member has not counted them.
    """
    core = dist.distributed_c10d
    outer, num_groups, known = core._world.default_pg, core._world.group_count, set(core._world.pg_map)
    with deepspeed_library.set_aside():
        core._update_default_pg(group)
        try:
            yield
        finally:
            for made in [one for one in core._world.pg_map if one not in known]:
                dist.destroy_process_group(made)
            core._update_default_pg(outer)
            if group is not outer:
                core._world.group_count = num_groups
