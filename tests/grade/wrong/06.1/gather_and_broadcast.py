# status: partial
# score: 5
# message: a rank sent to 3 other ranks; in a ring each of the 4 ranks sends to 1, its neighbour.

import torch
import torch.distributed as dist


def ring_all_reduce(x, group):
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
