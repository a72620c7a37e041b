# status: partial
# score: 2
# message: weight 0 of 8 is 0.748145 and not 0.753187 after step 2 on rank 0 of 4: this AdamW has forgotten step 1 at step 2, and `state` lives across steps.

import torch
import torch.distributed as dist


def zero1_step(weights, gradients, state, group, adamw):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    size = -(-weights.numel() // world_size)

    def padded_shards(x_n):
        padded = x_n.new_zeros(world_size * size)
        padded[: x_n.numel()] = x_n
        return list(padded.chunk(world_size))

    mean = gradients.new_empty(size)
    dist.reduce_scatter(mean, padded_shards(gradients), group=group)
    mean /= world_size

    shard = torch.nn.Parameter(padded_shards(weights)[rank].clone())
    shard.grad = mean
    torch.optim.AdamW([shard], **adamw).step()

    shards = [torch.empty_like(mean) for _ in range(world_size)]
    dist.all_gather(shards, shard.detach(), group=group)
    weights.copy_(torch.cat(shards)[: weights.numel()])
