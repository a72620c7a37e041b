# status: partial
# score: 2
# message: 6 of 6 numbers on rank 0 of the group (3, 1) are not the sum: number 0 is 3 instead of 1.

import torch
import torch.distributed as dist


def ring_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank()
    place_in_group = dist.get_rank(group)

    total = x.clone()
    chunks = total.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - step) % world_size]
        place = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(place)
        sending = dist.isend(outgoing, group=group, group_dst=(place_in_group + 1) % world_size)
        dist.recv(incoming, group=group, group_src=(place_in_group - 1) % world_size)
        sending.wait()
        if step < world_size - 1:
            place += incoming
        else:
            place.copy_(incoming)
    return total
