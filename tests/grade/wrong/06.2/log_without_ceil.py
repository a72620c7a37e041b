# status: partial
# score: 5
# message: crossover_bytes says 56496 B for alpha 5 us, 25 GB/s, 3 ranks; ring and tree take equal time at 0 B.

import math

import torch
import torch.distributed as dist


def tree_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    total, incoming = x.clone(), torch.empty_like(x)
    distances = [2**level for level in range((world_size - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(total, group=group, group_dst=rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            dist.recv(incoming, group=group, group_src=rank + distance)
            total += incoming
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(total, group=group, group_src=rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            dist.send(total, group=group, group_dst=rank + distance)
    return total


def crossover_bytes(alpha_s, beta_s_per_byte, world_size):
    levels = math.log2(world_size)
    steps_saved = world_size - 1 - levels
    bytes_added = levels - (world_size - 1) / world_size
    return alpha_s / beta_s_per_byte * steps_saved / bytes_added


def faster(num_bytes, alpha_s, beta_s_per_byte, world_size):
    return "ring" if num_bytes > crossover_bytes(alpha_s, beta_s_per_byte, world_size) else "tree"
