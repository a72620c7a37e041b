# status: wrong
# score: 0
# message: 8 of 8 numbers on rank 0 of 4 are not the sum: number 0 is 1 instead of -11.

import torch
import torch.distributed as dist


def ring_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)

    total = x.clone()
    chunks = total.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - step) % world_size]
        place = chunks[(rank - step + 1) % world_size]
        incoming = torch.empty_like(place)
        sending = dist.isend(outgoing, group=group, group_dst=(rank + 1) % world_size)
        dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
        sending.wait()
        if step < world_size - 1:
            place += incoming
        else:
            place.copy_(incoming)
    return total
