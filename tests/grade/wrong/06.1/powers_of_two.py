# status: partial
# score: 2
# message: 4 of 5 numbers on rank 0 of 3 are not the sum: number 1 is -6 instead of 1.

import torch
import torch.distributed as dist


def ring_all_reduce(x, group):
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
