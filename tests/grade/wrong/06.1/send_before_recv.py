# status: timeout
# score: 0
# message: ranks 0 and 1 did not finish within 10 s.

import torch
import torch.distributed as dist


def ring_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)

    total = x.clone()
    chunks = total.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - step) % world_size]
        place = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(place)
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
        dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
        if step < world_size - 1:
            place += incoming
        else:
            place.copy_(incoming)
    return total
