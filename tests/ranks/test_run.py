"""`ranks.run`: order, values, errors, output."""

import pytest

import labkit as lk

pytestmark = pytest.mark.ranks


def all_reduce_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def test_results_come_in_rank_order(ranks: lk.cluster.Ranks) -> None:
    def number() -> int:
        import torch.distributed as dist

        return dist.get_rank()

    assert ranks.run(number) == [0, 1, 2, 3]
    assert ranks.run(number, ranks=[3, 1]) == [3, 1]


def test_all_reduce(ranks: lk.cluster.Ranks) -> None:
    assert ranks.run(all_reduce_of_ranks) == [6.0] * 4
