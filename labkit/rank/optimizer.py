"""The optimizer, and clipping by the global gradient norm."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.rank.recorder import Recorder, num_bytes
from labkit.rank.state import Settings
from labkit.spec import Training

GROUP = "dp"

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


class Sharded:
    """The optimizer over this rank's part of tensors that all ranks of a group hold (ZeRO-1, Rajbhandari et al. 2020).

    Each tensor is cut into equal parts by its elements, the last ones shorter. A rank has optimizer states for its
    parts only, updates them in place, and one all-gather brings it the parts that the others updated.

    Args:
        training: which optimizer, and its settings.
        tensors: equal on all ranks of the group, contiguous.
        group: the ranks.
        recorder: gets the all-gathers.
    """

    def __init__(
        self, training: Training, tensors: Iterable[Tensor], group: dist.ProcessGroup, recorder: Recorder
    ) -> None:
        self._tensors = list(tensors)
        self._group, self._recorder = group, recorder
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._own = [self._part(tensor.detach(), self._rank) for tensor in self._tensors]
        self._optimizer = make(training, self._own)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The settings, and this rank's parts."""
        return self._optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """By this rank's part of a tensor, what the optimizer keeps for it."""
        return self._optimizer.state

    def step(self) -> None:
        """Update every tensor on every rank. Communicates: one all-gather of all tensors."""
        for own, tensor in zip(self._own, self._tensors, strict=True):
            own.grad = None if tensor.grad is None else self._part(tensor.grad, self._rank)
        self._optimizer.step()
        for own in self._own:
            own.grad = None
        start = self._recorder.mark()
        size = sum(self._part_size(tensor) for tensor in self._tensors)
        sent = torch.nn.functional.pad(torch.cat(self._own), (0, size - sum(own.numel() for own in self._own)))
        parts = [torch.empty_like(sent) for _ in range(self._num_ranks)]
        dist.all_gather(parts, sent, group=self._group)
        self._recorder.add("all_gather", start, group=GROUP, num_bytes=self._num_ranks * num_bytes(sent))
        for rank, part in enumerate(parts):
            if rank != self._rank:
                self._take(part, rank)

    def _take(self, packed: Tensor, rank: int) -> None:
        """Copy what another rank updated into the tensors."""
        targets = [self._part(tensor.detach(), rank) for tensor in self._tensors]
        sizes = [target.numel() for target in targets]
        torch._foreach_copy_(targets, list(packed[: sum(sizes)].split(sizes)))

    def _part(self, tensor: Tensor, rank: int) -> Tensor:
        size = self._part_size(tensor)
        return tensor.view(-1)[rank * size : (rank + 1) * size]

    def _part_size(self, tensor: Tensor) -> int:
        return -(-tensor.numel() // self._num_ranks)


def adjust(optimizer: Settings, training: Training) -> None:
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
