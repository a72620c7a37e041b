"""Tensor parallelism by DTensor: Megatron's column-then-row split, and the norm that torch does not give for it."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)


def shard(model, mesh):
    """Split attention by heads, feed-forward by hidden units, embedding and head by vocabulary; norms are whole."""
    whole = Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=whole),
        "head": ColwiseParallel(output_layouts=whole),
    }
    for i in range(len(model.layers)):
        # One DTensor for all columns, so that their input gradients take one all-reduce.
        three = (whole, None, None)
        plan[f"layers.{i}.attention"] = PrepareModuleInput(input_layouts=three, desired_input_layouts=three)
        plan[f"layers.{i}.feed_forward"] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            plan[f"layers.{i}.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def is_split(gradient):
    """Whether tensor parallelism split it: after `replicate` every gradient is a DTensor, but only some are split."""
    return isinstance(gradient, DTensor) and any(p.is_shard() for p in gradient.placements)


def clip(parameters, group, max_norm):
    """Clip by the global norm: split gradients summed over the group, whole ones counted once."""
    gradients = [p.grad for p in parameters]
    split = [g.to_local() for g in gradients if is_split(g)]
    whole = [g.to_local() if isinstance(g, DTensor) else g for g in gradients if not is_split(g)]
    square = torch.stack(torch._foreach_norm(split)).square().sum()
    dist.all_reduce(square, group=group)
    norm = (square + torch.stack(torch._foreach_norm(whole)).square().sum()).sqrt()
    torch._foreach_mul_(split + whole, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
