"""An exported configuration trains: DeepSpeed itself loads it on real ranks and takes steps."""

import contextlib
import io
import logging
import math
import os
import sys
import warnings

import pytest

import labkit as lk
from labkit.plan import Plan
from tests.ranks import bare

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MODEL = lk.spec.Model(num_layers=2, d_model=32, num_heads=4, vocab_size=64, seq_len=16)
STEPS = 3
LAYOUTS = ["dp2", "dp2 zero1 m2 b2", "dp2 zero2 bf16 m2", "dp2 zero3 bf16 no_reshard"]


def train(configs):
    """Runs in a rank: each configuration in turn, a few steps each; (losses, ZeRO stage, batch sizes) of each."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        import deepspeed

        # Only inference uses this operation, and compiling it takes minutes. (`deepspeed.comm.torch` is torch itself.)
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        return [one(torch, dist, deepspeed, config) for config in configs]


def one(torch, dist, deepspeed, config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    kind = next(engine.module.parameters()).dtype
    draw = torch.Generator().manual_seed(dist.get_rank())
    x_BD = torch.randn(micro, 32, generator=draw).to(kind)
    losses = []
    for _ in range(STEPS):
        for _ in range(steps):
            loss = (engine(x_BD).float() - 1).pow(2).mean()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses, int(engine.zero_optimization_stage()), (engine.train_batch_size(), micro, steps), str(kind)


@pytest.fixture(scope="module")
def trained():
    training = lk.spec.Training(num_steps=STEPS, learning_rate=0.01)
    sgd = lk.spec.Training(num_steps=STEPS, optimizer="sgd", learning_rate=0.1, clip_norm=None)
    pairs = [(text, training) for text in LAYOUTS] + [("dp2 zero2", sgd)]
    plans = [Plan(model=MODEL, layout=lk.spec.Layout.parse(text)) for text, _ in pairs]
    configs = [lk.export.deepspeed(plan, training=one) for plan, (_, one) in zip(plans, pairs, strict=True)]
    return plans, bare.run(train, 2, configs, timeout_s=220)


def test_deepspeed_trains_with_what_is_exported(trained):
    plans, ranks = trained
    for results in ranks:
        for plan, (losses, stage, batch, kind) in zip(plans, results, strict=True):
            layout = plan.layout
            assert stage == layout.zero_stage
            assert batch == (layout.global_batch_size, layout.microbatch_size, layout.num_microbatches)
            assert kind == ("torch.bfloat16" if layout.precision == "bf16" else "torch.float32")
            assert all(math.isfinite(loss) for loss in losses)
            assert losses[-1] < losses[0], str(layout)
