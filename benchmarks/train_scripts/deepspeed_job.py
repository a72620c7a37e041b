"""What the two DeepSpeed scripts share: the engine, and a step with it.

Settings that decide what is sent are those of the layout: every parameter sharded, gathered layer by layer for the
forward and again for the backward, and buckets of the model's size, not of 500,000,000 elements.
"""

import contextlib
import io
import logging
import os
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"
with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed

import torch.distributed as dist
from common import batch, corpus
from model import Decoder, Layer, loss_of
from sizes import CLIP_NORM, GLOBAL_BATCH_SIZE, LEARNING_RATE

warnings.simplefilter("ignore")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def make_step(stage, rank):
    """The function that takes one step with ZeRO's `stage` over four ranks and returns the mean loss."""
    tokens, model = corpus(), Decoder()
    num_elements = sum(p.numel() for p in model.parameters())
    if stage == 3:
        deepspeed.utils.set_z3_leaf_modules(model, [Layer])
    config = {
        "train_batch_size": GLOBAL_BATCH_SIZE,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH_SIZE // 4,
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": num_elements if stage == 1 else max(p.numel() for p in model.layers.parameters()) * 4,
            "allgather_bucket_size": num_elements,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        },
    }
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(number):
        inputs, targets = (x.chunk(4)[rank] for x in batch(tokens, number))
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        engine.get_global_grad_norm()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / 4

    return step
