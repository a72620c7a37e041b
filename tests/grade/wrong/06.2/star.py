# status: partial
# score: 8
# message: rank 0 of 4 sent and received 24576 B; in a tree nobody moves more than 2 x 2 tensors = 16384 B.

import math

import torch
import torch.distributed as dist


def tree_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank == 0:
        incoming = torch.empty_like(x)
        for other in range(1, world_size):
            dist.recv(incoming, group=group, group_src=other)
            x += incoming
        for other in range(1, world_size):
            dist.send(x, group=group, group_dst=other)
    else:
        dist.send(x, group=group, group_dst=0)
        dist.recv(x, group=group, group_src=0)
    return x


def crossover_bytes(alpha_s, beta_s_per_byte, world_size):
    levels = math.ceil(math.log2(world_size))
    steps_saved = world_size - 1 - levels
    bytes_added = levels - (world_size - 1) / world_size
    return alpha_s / beta_s_per_byte * steps_saved / bytes_added


def faster(num_bytes, alpha_s, beta_s_per_byte, world_size):
    return "ring" if num_bytes > crossover_bytes(alpha_s, beta_s_per_byte, world_size) else "tree"
