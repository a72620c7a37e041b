"""Every kind of wait that a learner's code can end up in: run on all four ranks, of which rank 3 does not take part.

The functions travel by value, so ranks need not find this module.
"""

import asyncio
import os
import queue
import select
import subprocess
import sys
import threading
import time

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

MISSING = 3
LONG_S = 3600.0


def here() -> bool:
    """Say that this rank is about to wait; False on the rank that never takes part."""
    from labkit.rank import report

    if dist.get_rank() != MISSING:
        report.emit("entered", {})
        return True
    return False


def numbers() -> torch.Tensor:
    return torch.ones(8)


# -- collectives; `group` is None for the world ------------------------------------------------------------------------


def all_reduce(group=None):
    if here():
        dist.all_reduce(numbers(), group=group)


def all_gather(group=None):
    if here():
        dist.all_gather([numbers() for _ in range(4)], numbers(), group=group)


def barrier(group=None):
    if here():
        dist.barrier(group=group)


def broadcast(group=None):
    if here():
        dist.broadcast(numbers(), src=MISSING, group=group)


def reduce_scatter(group=None):
    if here():
        dist.reduce_scatter_tensor(torch.zeros(2), numbers(), group=group)


def all_to_all(group=None):
    if here():
        dist.all_to_all_single(torch.zeros(8), numbers(), group=group)


def async_work(group=None):
    if here():
        dist.all_reduce(numbers(), group=group, async_op=True).wait()


def monitored_barrier(group=None):
    if here():
        dist.monitored_barrier(group=group)


COLLECTIVES = [all_reduce, all_gather, barrier, broadcast, reduce_scatter, all_to_all, async_work, monitored_barrier]


def on_new_group(collective):
    collective(dist.new_group())


def on_mesh_axes(collective):
    """Rank 2 waits for rank 3 along one axis; 0 and 1 pass it and wait for 2 and 3 along the other."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if here():
        collective(mesh.get_group("tp"))
        collective(mesh.get_group("dp"))


# -- from one rank to another ------------------------------------------------------------------------------------------


def recv():
    if here():
        dist.recv(numbers(), src=MISSING)


def irecv_wait():
    if here():
        dist.irecv(numbers(), src=MISSING).wait()


def send_32_megabytes():
    if here():
        dist.send(torch.ones(8 << 20), dst=MISSING)


def batch_isend_irecv():
    if here():
        sends = dist.P2POp(dist.isend, numbers(), MISSING)
        receives = dist.P2POp(dist.irecv, numbers(), MISSING)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()


# -- what stands on collectives ----------------------------------------------------------------------------------------


def group_creation():
    if here():
        dist.new_group()


def mesh_creation():
    from torch.distributed.device_mesh import init_device_mesh

    if here():
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def store_get():
    if here():
        dist.distributed_c10d._get_default_store().get("never set")


def fsdp_all_gather():
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(8, 8))
    if here():
        model(torch.ones(2, 8))


def ddp_backward():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    if here():
        model(torch.ones(2, 8)).sum().backward()


def dtensor_redistribute():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    sharded = distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", (4,)), [Shard(0)])
    if here():
        sharded.redistribute(placements=[Replicate()]).to_local().sum().item()


def pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    x = torch.ones(2, 8)
    rank = dist.get_rank()
    layer = torch.nn.Linear(8, 8)
    stage = PipelineStage(layer, rank, 4, torch.device("cpu"), input_args=(x,), output_args=(layer(x),))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: (output - target).sum())
    if here():
        schedule.step(*([torch.ones(4, 8)] if rank == 0 else []))


# -- Python ------------------------------------------------------------------------------------------------------------


def sleep():
    if here():
        time.sleep(LONG_S)


def lock():
    one = threading.Lock()
    if here():
        one.acquire()
        one.acquire()


def event():
    if here():
        threading.Event().wait()


def queue_get():
    if here():
        queue.Queue().get()


def condition():
    if here():
        with (one := threading.Condition()):
            one.wait()


def thread_join():
    if here():
        thread = threading.Thread(target=time.sleep, args=(LONG_S,), daemon=True)
        thread.start()
        thread.join()


def python_loop():
    count = 0
    if here():
        while True:
            count += 1


def numpy_loop():
    x = np.ones((64, 64))
    if here():
        while True:
            x = np.tanh(x @ x)


def torch_loop():
    x = torch.ones(64, 64)
    if here():
        while True:
            x = torch.tanh(x @ x)


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(LONG_S)


def data_loader():
    if here():
        next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork")))


def subprocess_run():
    if here():
        subprocess.run(["sleep", str(LONG_S)])


def select_on_nothing():
    if here():
        select.select([], [], [])


def cleans_up():
    os.environ["LABKIT_TEST_CLEANED"] = "no"
    if here():
        try:
            with torch.no_grad():
                dist.barrier()
        finally:
            os.environ["LABKIT_TEST_CLEANED"] = "yes"


def generator():
    def endless():
        while True:
            yield time.sleep(0.01)

    if here():
        for _ in endless():
            pass


def asyncio_run():
    async def wait():
        await asyncio.sleep(LONG_S)

    if here():
        asyncio.run(wait())


def catches_once():
    if here():
        try:
            time.sleep(LONG_S)
        except KeyboardInterrupt:
            time.sleep(LONG_S)


def nested_no_grad():
    @torch.no_grad()
    def inner():
        dist.all_reduce(numbers())

    def outer():
        inner()

    if here():
        outer()


OTHERS = [
    recv,
    irecv_wait,
    send_32_megabytes,
    batch_isend_irecv,
    group_creation,
    mesh_creation,
    store_get,
    fsdp_all_gather,
    ddp_backward,
    dtensor_redistribute,
    pipeline,
    sleep,
    lock,
    event,
    queue_get,
    condition,
    thread_join,
    python_loop,
    numpy_loop,
    torch_loop,
    data_loader,
    subprocess_run,
    select_on_nothing,
    cleans_up,
    generator,
    asyncio_run,
    catches_once,
    nested_no_grad,
]

# -- what cannot be interrupted ----------------------------------------------------------------------------------------


def swallows_for_ever():
    if here():
        while True:
            try:
                time.sleep(LONG_S)
            except KeyboardInterrupt:
                pass


def holds_the_gil():
    import ctypes

    if here():
        time.sleep(0.5)  # let the agent say so
        ctypes.PyDLL(None).sleep(600)


def sum_of_ranks() -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


cloudpickle.register_pickle_by_value(sys.modules[__name__])
