"""Four replicas: DistributedDataParallel."""

import torch
import torch.distributed as dist
from common import batch, corpus, run, start
from model import Decoder, loss_of
from sizes import CLIP_NORM, LEARNING_RATE
from torch.nn.parallel import DistributedDataParallel

rank = start()
tokens = corpus()
model = DistributedDataParallel(Decoder())
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def step(number):
    inputs, targets = (x.chunk(4)[rank] for x in batch(tokens, number))
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / 4


run(step)
