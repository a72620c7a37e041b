"""Recomputation keeps fewer activations, computes the same, and repeats what its region communicates."""

import functools

import pytest
import torch

from labkit.rank.model import Transformer, mean_loss
from labkit.spec import Model
from tests.ranks import bare
from tests.ranks.test_training import recorded

pytestmark = pytest.mark.ranks

MODEL = Model(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, vocab_size=64, seq_len=16)
FULL = "tp2 recompute:full"


def trained(recompute: str) -> tuple[int, list[torch.Tensor]]:
    """Bytes of distinct tensors that the forward keeps beside the weights, and the gradients."""
    torch.manual_seed(0)
    net = Transformer(MODEL, recompute=recompute)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.1)
    weights = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(2 * 16).view(2, 16) % MODEL.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = mean_loss(net(tokens), tokens)
    loss.backward()
    return sum(kept.values()), [parameter.grad for parameter in net.parameters()]


def test_less_is_kept_and_the_gradients_are_the_same_to_the_bit() -> None:
    num_bytes, gradients = trained("none")
    selective_bytes, selective = trained("selective")
    full_bytes, full = trained("full")
    assert full_bytes < selective_bytes < num_bytes
    for one, two, three in zip(gradients, selective, full, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def record():
    """Runs in each rank."""
    return recorded(FULL)


@functools.cache
def all_rows():
    return bare.run(record, 2)


def test_full_recomputation_repeats_the_all_reduce_inside_a_layer() -> None:
    for rank in range(2):
        for rows in all_rows()[rank]:
            sums = [row for row in rows if row[0] == "all_reduce" and row[6] == "tp"]
            # Embedding and head once; each of 4 layers twice forward and twice backward, and once more in between: the
            # recomputation stops before the layer's last all-reduce, which no gradient needs. Three for the loss.
            assert len(sums) == 2 + 4 * (2 + 2 + 1) + 3
