"""One replica split over four ranks."""

import torch
from common import batch, corpus, run, start
from model import Decoder, loss_of
from shards import clip, shard
from sizes import CLIP_NORM, LEARNING_RATE
from torch.distributed.device_mesh import init_device_mesh

rank = start()
tokens = corpus()
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
model = shard(Decoder(), mesh["tp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)


def step(number):
    inputs, targets = batch(tokens, number)
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    clip(model.parameters(), mesh["tp"].get_group(), CLIP_NORM)
    optimizer.step()
    return loss.item()


run(step)
