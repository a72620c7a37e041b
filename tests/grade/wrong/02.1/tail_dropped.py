# status: partial
# score: 8
# message: weight 3 of 5 is 1.375 and not 1.36506 after step 1 on rank 0 of 3: the last 2 never change; 5 weights on 3 ranks are shards of 2.

import torch
import torch.distributed as dist


def zero1_step(weights, gradients, state, group, adamw):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    size = weights.numel() // world_size

    mean = gradients.new_empty(size)
    dist.reduce_scatter(mean, list(gradients[: size * world_size].chunk(world_size)), group=group)
    mean /= world_size

    if not state:
        state["shard"] = torch.nn.Parameter(weights[rank * size : (rank + 1) * size].clone())
        state["optimizer"] = torch.optim.AdamW([state["shard"]], **adamw)
    state["shard"].grad = mean
    state["optimizer"].step()

    shards = [torch.empty_like(mean) for _ in range(world_size)]
    dist.all_gather(shards, state["shard"].detach(), group=group)
    weights[: size * world_size] = torch.cat(shards)
