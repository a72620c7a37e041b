"""Four pipeline stages, one layer each, eight micro-batches, 1F1B."""

import torch
import torch.distributed as dist
from common import batch, corpus, run, start
from model import Decoder, loss_of
from sizes import CLIP_NORM, LEARNING_RATE
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank = start()
tokens = corpus()
module = Decoder(layers=[rank], first=rank == 0, last=rank == 3)
schedule = Schedule1F1B(PipelineStage(module, rank, 4, torch.device("cpu")), 8, loss_fn=loss_of)
optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def step(number):
    inputs, targets = batch(tokens, number)
    optimizer.zero_grad()
    losses = []
    schedule.step(
        *([inputs] if rank == 0 else []), target=targets if rank == 3 else None, losses=losses, return_outputs=False
    )
    gradients = [p.grad for p in module.parameters()]
    totals = torch.zeros(2)
    totals[0] = torch.stack(torch._foreach_norm(gradients)).square().sum()
    if rank == 3:
        totals[1] = torch.stack(losses).mean()
    dist.all_reduce(totals)
    torch._foreach_mul_(gradients, torch.clamp(CLIP_NORM / (totals[0].sqrt() + 1e-6), max=1.0))
    optimizer.step()
    return totals[1].item()


run(step)
