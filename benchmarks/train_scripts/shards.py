"""Tensor parallelism by DTensor: Megatron's column-then-row split, and the norm that torch does not give for it."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def shard(model, mesh):
    """Split attention by heads and the feed-forward by hidden units; embedding, norms and head stay whole."""
    plan = {}
    for i in range(len(model.layers)):
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            plan[f"layers.{i}.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def clip(parameters, group, max_norm):
    """Clip by the global norm: split gradients summed over the group, whole ones counted once."""
    gradients = [p.grad for p in parameters]
    split = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    whole = [g for g in gradients if not isinstance(g, DTensor)]
    square = torch.stack(torch._foreach_norm(split)).square().sum()
    dist.all_reduce(square, group=group)
    norm = (square + torch.stack(torch._foreach_norm(whole)).square().sum()).sqrt()
    torch._foreach_mul_(split + whole, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
