"""Four shards: `fully_shard`, layer by layer, gathered for the forward and again for the backward."""

import torch
import torch.distributed as dist
from common import batch, corpus, run, start
from model import Decoder, loss_of
from sizes import CLIP_NORM, LEARNING_RATE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank = start()
tokens = corpus()
mesh = init_device_mesh("cpu", (4,))
model = Decoder()
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for module in (*model.layers, model):
    module.set_force_sum_reduction_for_comms(True)  # gloo knows sums only
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def step(number):
    inputs, targets = (x.chunk(4)[rank] for x in batch(tokens, number))
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    norm.full_tensor()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / 4


run(step)
