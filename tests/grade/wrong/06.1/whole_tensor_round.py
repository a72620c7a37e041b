# status: partial
# score: 5
# message: a rank sent 12288 B; a ring of 4 ranks sends at most 6 chunks of 1024 B = 6144 B a rank.

import torch
import torch.distributed as dist


def ring_all_reduce(x, group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    total, outgoing = x.clone(), x.clone()
    for _ in range(world_size - 1):
        incoming = torch.empty_like(x)
        sending = dist.isend(outgoing, group=group, group_dst=(rank + 1) % world_size)
        dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
        sending.wait()
        total += incoming
        outgoing = incoming
    return total
