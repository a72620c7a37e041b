"""Trials of a DeepSpeed configuration and of code that saves and restores: engines are made from it, and train.

B micro-batch, D features, H hidden.
"""

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit.rank import deepspeed_library
from labkit.rank.deepspeed_by_hand import world_of
from labkit.rank.trials.attempt import device

__all__ = ["prepare", "train_and_restore"]

NUM_FEATURES, NUM_HIDDEN = 8, 16
MAX_CHARS = 300

_prepared = False


def prepare() -> None:
    """Load DeepSpeed and make one engine: the first one of a process imports for seconds, which no answer can help."""
    global _prepared
    deepspeed_library.load()
    if _prepared:
        return
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with world_of(alone):
        zero = {"stage": 3, "reduce_bucket_size": 1000}
        optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
        config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": zero, "optimizer": optimizer}
        _engine(config, seed=0).destroy()
    dist.destroy_process_group(alone)
    _prepared = True


def train_and_restore(
    answers: Mapping[str, Callable[..., Any]],
    group: dist.ProcessGroup,
    *,
    asked: Mapping[str, Any],
    num_before: int,
    num_after: int,
    num_skipped: int,
) -> dict[str, Any]:
    """Train with the answer's configuration; save, go on; restore into a fresh engine, and go on there as well.

    Runs on: every member, for which the group is the world. Communicates: what DeepSpeed does.

    Args:
        answers: `deepspeed_config`, `save` and `restore`.
        group: the ranks to train on.
        asked: keyword arguments of `deepspeed_config`, without the world size.
        num_before: steps before the engine is saved.
        num_after: steps after that, in the engine that was saved and in the restored one; 0: nothing is saved.
        num_skipped: samples that were read and not trained on.
    """
    with world_of(group), _shared_folder() as folder, warnings.catch_warnings(action="ignore"):
        config = answers["deepspeed_config"](world_size=dist.get_world_size(), **asked)
        try:
            engine = _engine(config, seed=0)
        except Exception as error:  # DeepSpeed's refusals are assertions and errors of many kinds
            return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_CHARS]}
        told = _facts(engine)
        told["trained"] = _train(engine, 0, num_before)
        if num_after:
            num_samples = num_before * engine.train_batch_size() + num_skipped
            answers["save"](engine, folder, num_samples)
            told |= {"saved": sorted(os.listdir(folder)), "num_samples": num_samples}
            told["unbroken"] = _train(engine, num_before, num_after)
            told |= _restored(answers["restore"], config, folder, num_before, num_after)
        engine.destroy()
        return told


def _engine(config: Any, *, seed: int) -> Any:
    """A DeepSpeed engine around a small model with weights of its own."""
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(NUM_FEATURES, NUM_HIDDEN), torch.nn.Tanh(), torch.nn.Linear(NUM_HIDDEN, 1))
    model = torch.nn.Sequential(*layers).to(device())
    deepspeed = deepspeed_library.load()
    with deepspeed_library.quiet():
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    return engine


def _facts(engine: Any) -> dict[str, Any]:
    """What an engine made of its configuration."""
    zero = engine._config.zero_config
    offloads = {"optimizer": zero.offload_optimizer, "param": zero.offload_param}
    return {
        "batch": engine.train_batch_size(),
        "micro": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "stage": int(engine.zero_optimization_stage()),
        "dtype": str(next(engine.module.parameters()).dtype).removeprefix("torch."),
        "offloaded": [name for name, one in offloads.items() if one is not None and one.device != "none"],
        "bucket_numbers": int(zero.reduce_bucket_size),
    }


def _train(engine: Any, first_step: int, num_steps: int) -> list[dict[str, float]]:
    """Take steps; the learning rate that each was taken with, and its loss over all ranks."""
    seen = []
    for step in range(first_step, first_step + num_steps):
        rate = float(engine.optimizer.param_groups[0]["lr"])
        loss = torch.zeros((), device=device())
        for microbatch in range(engine.gradient_accumulation_steps()):
            x_BD = _samples(engine, step, microbatch)
            part = (engine(x_BD).float() - x_BD.float().sum(dim=1, keepdim=True)).square().mean()
            engine.backward(part)
            engine.step()
            loss += part.detach()
        dist.all_reduce(loss)
        seen.append({"rate": rate, "loss": loss.item()})
    return seen


def _samples(engine: Any, step: int, microbatch: int) -> torch.Tensor:
    """The samples of this rank, which depend on nothing but step, micro-batch and rank."""
    draw = torch.Generator().manual_seed((step * 100 + microbatch) * 100 + dist.get_rank())
    x_BD = torch.randn(engine.train_micro_batch_size_per_gpu(), NUM_FEATURES, generator=draw)
    return x_BD.to(device(), next(engine.module.parameters()).dtype)


def _restored(restore: Callable[..., Any], config: Any, folder: str, num_before: int, num_after: int) -> dict[str, Any]:
    """Have the answer restore into an engine that has other weights, and go on with it."""
    engine, loads = _engine(config, seed=1), []
    load = engine.load_checkpoint

    def load_checkpoint(load_dir: Any, tag: Any = None, **options: Any) -> Any:
        path, client_state = load(load_dir, tag, **options)
        where = os.path.relpath(load_dir, folder)
        loads.append({"where": where[:MAX_CHARS], "tag": str(tag)[:MAX_CHARS], "found": path is not None})
        return path, client_state

    engine.load_checkpoint = load_checkpoint
    returned = restore(engine, folder)
    told = {
        "loads": loads,
        "returned": returned if type(returned) is int else type(returned).__name__[:MAX_CHARS],
        "step": engine.global_steps,
        "resumed": _train(engine, num_before, num_after),
    }
    engine.destroy()
    return told


@contextlib.contextmanager
def _shared_folder() -> Iterator[str]:
    """One new folder for all ranks of the world; gone afterwards."""
    made = [tempfile.mkdtemp(prefix="labkit-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    try:
        yield str(made[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(made[0]), ignore_errors=True)
