"""The optimizer, and clipping by the global gradient norm."""

from collections.abc import Iterable

import torch
from torch import Tensor

from labkit.spec import Training

_EPSILON = 1e-6


def make(training: Training, tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Make the optimizer that a run asks for, over plain local tensors.

    Every element is updated by itself, so each rank's part of the state is all that its part of the weights needs.
    """
    if training.optimizer == "sgd":
        return torch.optim.SGD(list(tensors), lr=training.learning_rate, weight_decay=training.weight_decay, fused=True)
    return torch.optim.AdamW(
        list(tensors),
        lr=training.learning_rate,
        betas=training.betas,
        weight_decay=training.weight_decay,
        fused=True,
    )


def adjust(optimizer: torch.optim.Optimizer, training: Training) -> None:
    """Give a live optimizer the settings of the run that goes on with it."""
    for group in optimizer.param_groups:
        group["lr"] = training.learning_rate
        group["weight_decay"] = training.weight_decay
        if "betas" in group:
            group["betas"] = training.betas


def clip(gradients: Iterable[Tensor], norm: float, clip_norm: float | None) -> None:
    """Scale gradients in place so that their global norm is at most `clip_norm` (Pascanu et al. 2013).

    Args:
        gradients: this rank's.
        norm: the global norm, equal on all ranks.
        clip_norm: the largest norm, or None.
    """
    if clip_norm is not None and norm > clip_norm:
        torch._foreach_mul_(list(gradients), clip_norm / (norm + _EPSILON))
