# status: partial
# score: 6
# message: 4 of 5 numbers on rank 0 of 3 are not the sum: number 1 is -6 instead of 1.

import math

import torch
import torch.distributed as dist


def tree_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    for level in range(world_size.bit_length() - 1):
        partner = rank ^ (1 << level)
        if partner >= world_size:
            continue
        incoming = torch.empty_like(x)
        sending = dist.isend(x.clone(), group=group, group_dst=partner)
        dist.recv(incoming, group=group, group_src=partner)
        sending.wait()
        x += incoming
    return x


def crossover_bytes(alpha_s, beta_s_per_byte, world_size):
    levels = math.ceil(math.log2(world_size))
    steps_saved = world_size - 1 - levels
    bytes_added = levels - (world_size - 1) / world_size
    return alpha_s / beta_s_per_byte * steps_saved / bytes_added


def faster(num_bytes, alpha_s, beta_s_per_byte, world_size):
    return "ring" if num_bytes > crossover_bytes(alpha_s, beta_s_per_byte, world_size) else "tree"
