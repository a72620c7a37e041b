# status: wrong
# score: 0
# message: weight 0 of 4 is 0.63421 and not 0.63405 after step 1 on rank 0 of 2: each shard moved by its owner's gradient alone, and the step uses the mean of all.

import torch
import torch.distributed as dist


def zero1_step(weights, gradients, state, group, adamw):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    size = -(-weights.numel() // world_size)

    def padded_shards(x_n):
        padded = x_n.new_zeros(world_size * size)
        padded[: x_n.numel()] = x_n
        return list(padded.chunk(world_size))

    mean = padded_shards(gradients)[rank].clone()

    if not state:
        state["shard"] = torch.nn.Parameter(padded_shards(weights)[rank].clone())
        state["optimizer"] = torch.optim.AdamW([state["shard"]], **adamw)
    state["shard"].grad = mean
    state["optimizer"].step()

    shards = [torch.empty_like(mean) for _ in range(world_size)]
    dist.all_gather(shards, state["shard"].detach(), group=group)
    weights.copy_(torch.cat(shards)[: weights.numel()])
