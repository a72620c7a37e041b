# status: partial
# score: 8
# message: 6 messages waited for each other in a row; a tree of 4 ranks takes at most 2 x 2 = 4.

import math

import torch
import torch.distributed as dist


def tree_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    incoming = torch.empty_like(x)
    if rank + 1 < world_size:
        dist.recv(incoming, group=group, group_src=rank + 1)
        x += incoming
    if rank > 0:
        dist.send(x, group=group, group_dst=rank - 1)
        dist.recv(x, group=group, group_src=rank - 1)
    if rank + 1 < world_size:
        dist.send(x, group=group, group_dst=rank + 1)
    return x


def crossover_bytes(alpha_s, beta_s_per_byte, world_size):
    levels = math.ceil(math.log2(world_size))
    steps_saved = world_size - 1 - levels
    bytes_added = levels - (world_size - 1) / world_size
    return alpha_s / beta_s_per_byte * steps_saved / bytes_added


def faster(num_bytes, alpha_s, beta_s_per_byte, world_size):
    return "ring" if num_bytes > crossover_bytes(alpha_s, beta_s_per_byte, world_size) else "tree"
