"""Every kind of wait that a rank can be stuck in while rank 3 does nothing; each function travels whole."""

# ruff: noqa: PLC0415  (functions bring their imports along to the ranks)


def world_all_reduce(rank):
    import torch
    import torch.distributed as dist

    if rank != 3:
        dist.all_reduce(torch.ones(1))


def mesh_axis(rank):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group()
    if rank != 3:
        dist.all_reduce(torch.ones(1), group=group)  # rank 2 waits for 3; 0 and 1 go on
        dist.all_reduce(torch.ones(1), group=mesh["dp"].get_group() if rank == 1 else None)


def pipeline(rank):
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(nn.Linear(8, 8), rank, 4, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x = torch.ones(8, 8)
    if rank != 3:
        schedule.step(*([x] if rank == 0 else []), target=None)


def fsdp_all_gather(rank):
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    if rank != 3:
        model(torch.ones(2, 32)).sum().backward()


def ddp_backward(rank):
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(32, 32))
    loss = model(torch.ones(2, 32)).sum()
    if rank != 3:
        loss.backward()


def recv(rank):
    import torch
    import torch.distributed as dist

    if rank != 3:
        dist.recv(torch.ones(1), src=3)


def group_creation(rank):
    import torch.distributed as dist

    if rank != 3:
        dist.new_group([0, 1, 2, 3])


def sleep(rank):
    import time

    if rank != 3:
        time.sleep(3600)


def lock(rank):
    import threading

    if rank != 3:
        held = threading.Lock()
        held.acquire()
        held.acquire()


def pure_python(rank):
    if rank != 3:
        number = 0
        while True:
            number += 1


def data_loader(rank):
    import time

    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            time.sleep(3600)
            return index

    if rank != 3:
        for _ in DataLoader(Slow(), num_workers=1):
            pass


WAITS = {
    "collective on the world": world_all_reduce,
    "collective on a mesh axis": mesh_axis,
    "pipeline": pipeline,
    "FSDP2 all-gather": fsdp_all_gather,
    "DDP backward": ddp_backward,
    "recv": recv,
    "group creation": group_creation,
    "time.sleep": sleep,
    "lock": lock,
    "pure Python": pure_python,
    "DataLoader": data_loader,
}
