"""Traffic sees every form of a collective, and counts the bytes of its largest side."""

from typing import Any

import pytest

from labkit.cluster import Ranks

pytestmark = pytest.mark.ranks

SIZE = 6
WORLD_SIZE = 4
WHOLE_BYTES = SIZE * WORLD_SIZE * 4
SHARD_BYTES = SIZE * 4


def every_form(size: int) -> dict[str, list[Any]]:
    """Call each form of each collective once; returns what was counted of each."""
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    from labkit.rank.trials.traffic import Traffic

    warnings.simplefilter("ignore", FutureWarning)
    group, world_size = dist.group.WORLD, dist.get_world_size()
    other = dist.get_rank() ^ 1

    def some() -> torch.Tensor:
        return torch.ones(size)

    def whole() -> torch.Tensor:
        return torch.ones(size * world_size)

    def parts() -> list[torch.Tensor]:
        return list(whole().chunk(world_size))

    def swap(receive: Any) -> None:
        sent = dist.isend(some(), other)
        receive()
        sent.wait()

    forms = {
        "all_reduce": lambda: dist.all_reduce(some()),
        "all_reduce, functional": lambda: functional.all_reduce(some(), "sum", group).wait(),
        "all_gather": lambda: dist.all_gather(parts(), some()),
        "all_gather, into tensor": lambda: dist.all_gather_into_tensor(whole(), some()),
        "all_gather, functional": lambda: functional.all_gather_tensor(some(), 0, group).wait(),
        "reduce_scatter": lambda: dist.reduce_scatter(some(), parts()),
        "reduce_scatter, tensor": lambda: dist.reduce_scatter_tensor(some(), whole()),
        "reduce_scatter, functional": lambda: functional.reduce_scatter_tensor(whole(), "sum", 0, group).wait(),
        "reduce_scatter, backward": lambda: (
            functional.all_gather_tensor_autograd(some().requires_grad_(), 0, group).sum().backward()
        ),
        "send and recv": lambda: swap(lambda: dist.recv(some(), other)),
        "send and recv, from anybody": lambda: swap(lambda: dist.recv(some())),
        "broadcast": lambda: dist.broadcast(some(), 0),
        "all_to_all": lambda: dist.all_to_all_single(whole(), whole()),
        "barrier": lambda: dist.barrier(),
    }
    counted = {}
    for name, form in forms.items():
        with Traffic() as traffic:
            form()
        counted[name] = traffic.calls
        dist.barrier()
    return counted


def test_every_form_is_counted_once_with_its_largest_side(ranks: Ranks) -> None:
    for rank, counted in enumerate(ranks.run(every_form, SIZE)):
        gathered, scattered = ["all_gather", WHOLE_BYTES, -1], ["reduce_scatter", WHOLE_BYTES, -1]
        sent, received = ["send", SHARD_BYTES, rank ^ 1], ["recv", SHARD_BYTES, rank ^ 1]
        assert counted == {
            "all_reduce": [["all_reduce", SHARD_BYTES, -1]],
            "all_reduce, functional": [["all_reduce", SHARD_BYTES, -1]],
            "all_gather": [gathered],
            "all_gather, into tensor": [gathered],
            "all_gather, functional": [gathered],
            "reduce_scatter": [scattered],
            "reduce_scatter, tensor": [scattered],
            "reduce_scatter, functional": [scattered],
            "reduce_scatter, backward": [gathered, scattered],
            "send and recv": [sent, received],
            "send and recv, from anybody": [sent, ["recv", SHARD_BYTES, -1]],
            "broadcast": [["broadcast", SHARD_BYTES, -1]],
            "all_to_all": [["all_to_all", WHOLE_BYTES, -1]],
            "barrier": [["barrier", 0, -1]],
        }
