"""What every script here shares: the group, the batches, the clock."""

import argparse
import glob
import json
import os
import statistics
import sysconfig
import time

import torch
import torch.distributed as dist
from sizes import GLOBAL_BATCH_SIZE, MODEL, WARM_UP_STEPS


def start():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    return dist.get_rank()


def corpus():
    files = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))[:100]
    return torch.frombuffer(bytearray(b"".join(open(name, "rb").read() for name in files)), dtype=torch.uint8)


def batch(tokens, step):
    """The global batch of a step: inputs and targets, both (GLOBAL_BATCH_SIZE, seq_len)."""
    length = MODEL["seq_len"] + 1
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - length, (GLOBAL_BATCH_SIZE,), generator=generator)
    samples = torch.stack([tokens[i : i + length] for i in starts.tolist()]).long()
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def run(step):
    """Call `step(number) -> loss` so often; rank 0 prints the median seconds of a step after the warm-up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    num_steps = parser.parse_args().steps
    seconds, loss = [], None
    for number in range(num_steps):
        began = time.perf_counter()
        loss = step(number)
        seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print("STEP " + json.dumps({"step_s": statistics.median(seconds[WARM_UP_STEPS:]), "loss": loss}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
