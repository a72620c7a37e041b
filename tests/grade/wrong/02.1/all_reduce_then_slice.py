# status: partial
# score: 8
# message: a rank of 3 sends 96 B in a step by all_reduce + all_gather, and 64 B are enough: 2(N-1)/N of 48 B of gradients.

import torch
import torch.distributed as dist


def zero1_step(weights, gradients, state, group, adamw):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    size = -(-weights.numel() // world_size)

    def padded_shards(x_n):
        padded = x_n.new_zeros(world_size * size)
        padded[: x_n.numel()] = x_n
        return list(padded.chunk(world_size))

    dist.all_reduce(gradients, group=group)
    mean = padded_shards(gradients / world_size)[rank]

    if not state:
        state["shard"] = torch.nn.Parameter(padded_shards(weights)[rank].clone())
        state["optimizer"] = torch.optim.AdamW([state["shard"]], **adamw)
    state["shard"].grad = mean
    state["optimizer"].step()

    shards = [torch.empty_like(mean) for _ in range(world_size)]
    dist.all_gather(shards, state["shard"].detach(), group=group)
    weights.copy_(torch.cat(shards)[: weights.numel()])
