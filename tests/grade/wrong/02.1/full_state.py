# status: partial
# score: 8
# message: rank 3 of 4 keeps 128 numbers between steps, and 48 are enough: two averages and a copy of the weights for its shard of 16 of 64.

import torch
import torch.distributed as dist


def zero1_step(weights, gradients, state, group, adamw):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    n = weights.numel()
    size = -(-n // world_size)

    def padded(x_n):
        return torch.cat([x_n, x_n.new_zeros(world_size * size - n)])

    mean = gradients.new_empty(size)
    dist.reduce_scatter(mean, list(padded(gradients).chunk(world_size)), group=group)
    mean /= world_size

    # The optimizer is made for all weights, though only one shard of them gets a gradient here.
    if not state:
        state["optimizer"] = torch.optim.AdamW([torch.nn.Parameter(weights)], **adamw)
    (parameter,) = state["optimizer"].param_groups[0]["params"]
    parameter.grad = torch.zeros_like(parameter)
    own = slice(rank * size, min((rank + 1) * size, n))
    parameter.grad[own] = mean[: len(weights[own])]
    state["optimizer"].step()

    shards = [torch.empty_like(mean) for _ in range(world_size)]
    dist.all_gather(shards, padded(weights).chunk(world_size)[rank].contiguous(), group=group)
    weights.copy_(torch.cat(shards)[:n])
