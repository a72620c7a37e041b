"""Two replicas, each split over two ranks: DTensor inside, `replicate` outside."""

import torch
import torch.distributed as dist
from common import batch, corpus, run, start
from model import Decoder, loss_of
from shards import clip, shard
from sizes import CLIP_NORM, LEARNING_RATE
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

rank = start()
tokens = corpus()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = replicate(shard(Decoder(), mesh["tp"]), mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)


def step(number):
    inputs, targets = (x.chunk(2)[mesh["dp"].get_local_rank()] for x in batch(tokens, number))
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    clip(model.parameters(), mesh["tp"].get_group(), CLIP_NORM)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh["dp"].get_group())
    return mean.item() / 2


run(step)
