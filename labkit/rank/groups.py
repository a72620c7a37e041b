"""The world's process group inside a rank: built, torn down and built anew in the same process."""

import datetime
import gc
from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.rank import release

_generation = 0
_rank = -1
_backend = "gloo"
_world: object = None
_on_tear_down: list[Callable[[], None]] = []

# Interrupts free a rank that waits, so a collective may wait long for a learner who thinks.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


def device() -> torch.device:
    """The device of this rank: its one visible GPU under NCCL, else the CPU."""
    return torch.device("cuda", 0) if _backend == "nccl" else torch.device("cpu")


def device_name() -> str:
    """What the device calls itself, such as "NVIDIA H200"; "cpu" on the CPU."""
    return torch.cuda.get_device_name(0) if device().type == "cuda" else "cpu"


def seat(rank: int, backend: str) -> None:
    """Say once which rank this process is, and over what it talks."""
    global _rank, _backend
    _rank, _backend = rank, backend


def intact() -> bool:
    """Whether the world's group is still the one that was built here: a learner's code may destroy it."""
    return _world is dist.group.WORLD


def generation() -> int:
    """How often the groups of this process were built; groups and meshes of an earlier generation are dead."""
    return _generation


def on_tear_down(forget: Callable[[], None]) -> None:
    """Have `forget()` called whenever the groups end: what still holds one keeps its threads and sockets alive."""
    _on_tear_down.append(forget)


def build(*, world_size: int, backend: str, store_host: str, store_port: int, generation: int, timeout_s: float) -> int:
    """Tear down what is left of the old groups and join the world's new one.

    Runs on: every rank at once; each knows its own number.
    Communicates: with the rendezvous store, then each rank connects to every other.

    Returns:
        The generation now in force.
    """
    global _generation, _world
    tear_down()
    timeout = datetime.timedelta(seconds=timeout_s)
    store = release.open_store(
        lambda: dist.TCPStore(store_host, store_port, is_master=False, wait_for_workers=False, timeout=timeout)
    )
    prefixed = dist.PrefixStore(f"generation{generation}", store)
    dist.init_process_group(backend, store=prefixed, rank=_rank, world_size=world_size, timeout=timeout)
    dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT)
    _generation, _world = generation, dist.group.WORLD
    return generation


def tear_down() -> None:
    """End every group of this process without asking the others: they may be gone.

    An aborted gloo group that somebody still holds would go on working, so its sockets are shut down first.
    """
    core = dist.distributed_c10d
    release.shut()
    if dist.is_initialized():
        core._abort_process_group()
    # A build that was cut short on some ranks only leaves a count (names of groups are made of it, and ranks meet under
    # these names in the store) and a half-registered group.
    core._unregister_all_process_groups()
    core._world.group_count = 0
    for forget in _on_tear_down:
        forget()
    gc.collect()  # wrapped modules are cyclic, and hold their groups
    release.forget()
