# status: wrong
# score: 0
# message: rank 0 of 2 has the sum in only 2 of 4 numbers, and the other ranks hold the rest: after the reduce phase the finished chunks must go round once more.

import torch
import torch.distributed as dist


def ring_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)

    total = x.clone()
    chunks = total.tensor_split(world_size)
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        place = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(place)
        sending = dist.isend(outgoing, group=group, group_dst=(rank + 1) % world_size)
        dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
        sending.wait()
        place += incoming
    return total
