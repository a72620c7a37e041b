# status: partial
# score: 2
# message: the last 2 of 5 numbers are not the sum: 5 does not divide among 3 ranks, and the rest was left out.

import torch
import torch.distributed as dist


def ring_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)

    total = x.clone()
    size = x.numel() // world_size
    chunks = [total[part * size : (part + 1) * size] for part in range(world_size)]
    for step in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - step) % world_size]
        place = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(place)
        sending = dist.isend(outgoing, group=group, group_dst=(rank + 1) % world_size)
        dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
        sending.wait()
        if step < world_size - 1:
            place += incoming
        else:
            place.copy_(incoming)
    return total
