"""Some ranks train with DeepSpeed as if they were the world: afterwards all of them train together as before."""

import sys

import cloudpickle
import pytest

import labkit as lk

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CALL = "labkit.rank.deepspeed_by_hand:call"


def losses() -> list[float]:
    """Two steps of ZeRO-3 in the world as it is."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    zero = {"stage": 3, "reduce_bucket_size": 1000}
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": optimizer}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    seen = []
    for _ in range(2):
        loss = engine(torch.ones(1, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    engine.destroy()
    return seen


def alone(members: tuple[int, ...]) -> tuple[int, int, list[float]] | None:
    """The members train in a world of their own: (rank, world size, losses) there."""
    import torch.distributed as dist

    from labkit.rank.deepspeed_by_hand import world_of

    group = dist.new_group(list(members), sort_ranks=False)
    if dist.get_rank() not in members:
        return None
    with world_of(group):
        return dist.get_rank(), dist.get_world_size(), losses()


def name_of_linear() -> str:
    """ZeRO-3 has a linear of its own, for everything in the process."""
    import torch

    return torch.nn.functional.linear.__name__


def test_some_ranks_train_alone_and_then_all_together(ranks: lk.cluster.Ranks) -> None:
    together = ranks.run(CALL, losses)
    for members in ((3, 1), (0, 2, 1), (2,)):
        told = ranks.run(CALL, alone, members)
        assert [told[rank][:2] for rank in members] == [(place, len(members)) for place in range(len(members))]
        assert all(told[rank] is None for rank in range(4) if rank not in members)
        assert ranks.run(CALL, losses) == together
    assert ranks.run(name_of_linear) == ["linear"] * 4
