"""Ranks on GPUs over NCCL: pinned one per GPU, interrupted, trained in bf16."""

from collections.abc import Iterator

import pytest

import labkit as lk
from labkit.cluster import devices

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[lk.cluster.Ranks]:
    """One rank per GPU of this machine."""
    with lk.cluster.start(len(devices._gpus())) as started:
        yield started


def test_each_rank_has_a_gpu_of_its_own(gpu_ranks: lk.cluster.Ranks) -> None:
    def where() -> tuple[int, str]:
        import torch

        return torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid)

    assert gpu_ranks.backend == "nccl"
    seen = gpu_ranks.run(where)
    assert [count for count, _ in seen] == [1] * len(gpu_ranks)
    assert len({uuid for _, uuid in seen}) == len(gpu_ranks)


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)
    return x.item()


def test_all_reduce(gpu_ranks: lk.cluster.Ranks) -> None:
    assert gpu_ranks.run(all_reduce) == [float(len(gpu_ranks))] * len(gpu_ranks)


def test_interrupt_keeps_every_process(gpu_ranks: lk.cluster.Ranks) -> None:
    def wait_for_the_last() -> None:
        import time

        import torch
        import torch.distributed as dist

        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(600)
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()

    pids = gpu_ranks.pids
    call = gpu_ranks.run(wait_for_the_last, block=False)
    assert not call.wait(timeout_s=2)
    gpu_ranks.interrupt()
    assert gpu_ranks.pids == pids
    assert gpu_ranks.run(all_reduce) == [float(len(gpu_ranks))] * len(gpu_ranks)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_on_gpus_learns_and_knows_its_efficiency(gpu_ranks: lk.cluster.Ranks, precision: str) -> None:
    model = lk.spec.Model.preset("tiny")
    plan = lk.plan.build(model, lk.spec.Layout(dp=len(gpu_ranks), microbatch_size=8, precision=precision))
    run = lk.launch.train(gpu_ranks, plan, num_steps=20, progress=False)
    assert run.losses[-1] < run.losses[0]
    assert run.mfu is None or 0 < run.mfu < 1
    assert run.trace.peak_bytes > 0
