"""How much a step keeps on this rank: activations, as autograd is asked to remember them, and the model's states."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labkit.plan import Plan
from labkit.rank import state, training
from labkit.rank.parameters import Weights
from labkit.spec import Training


def most_kept(plan: Plan) -> int | None:
    """Train one step from fresh weights; return the most bytes that autograd kept for backward passes at any moment.

    Every storage counts once, however many tensors share it; weights do not count, and neither does what a step needs
    beside (gradients, optimizer states, buffers of communication). Under recomputation, what is computed again counts
    while its layer's backward runs.

    Runs on: the layout's ranks at once. Communicates: a training step.

    Returns:
        Bytes, or None on ranks that the layout does without.
    """
    kept = _Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, kept.give_back):
        done = training.train(plan, Training(num_steps=1, trace=False))
    return None if done is None else kept.most_bytes


def states_held(plan: Plan) -> tuple[int, int, int] | None:
    """Train one step from fresh weights; return the bytes of what this rank keeps of weights, gradients and AdamW.

    Weights and the optimizer's averages are weighed after the step, gradients just before the optimizer uses them:
    under ZeRO-2 by FSDP, weights that are whole from forward to backward are shards again by then.

    Runs on: the layout's ranks at once. Communicates: a training step.

    Returns:
        Three numbers of bytes, or None on ranks that the layout does without.
    """
    gradient_bytes = 0

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal gradient_bytes
        gradient_bytes = _num_bytes(tensor.grad for tensor in _tensors())

    hook = register_optimizer_step_pre_hook(look)
    try:
        done = training.train(plan, Training(num_steps=1, trace=False))
    finally:
        hook.remove()
    if done is None:
        return None
    optimizer: Any = state.current().optimizer
    averages = [of_tensor[name] for of_tensor in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return _num_bytes(_tensors()), gradient_bytes, _num_bytes(averages)


def _tensors() -> Iterable[Tensor]:
    """This rank's part of every weight, by torch's engine."""
    weights = state.current().weights
    return weights.tensors.values() if isinstance(weights, Weights) else ()


def _num_bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class _Kept:
    """Counts storages while something keeps them."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._bytes = 0
        self._holders: dict[int, int] = {}  # address of a storage -> how many hold it

    def keep(self, tensor: Tensor) -> Any:
        if _is_weight(tensor):
            return tensor
        storage = _memory_of(tensor).untyped_storage()
        return _Held(self, tensor, storage.data_ptr(), storage.nbytes())

    @staticmethod
    def give_back(what: Any) -> Tensor:
        return what.tensor if isinstance(what, _Held) else what

    def begin(self, address: int, num_bytes: int) -> None:
        holders = self._holders.get(address, 0)
        self._holders[address] = holders + 1
        if not holders:
            self._bytes += num_bytes
            self.most_bytes = max(self.most_bytes, self._bytes)

    def end(self, address: int, num_bytes: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            self._bytes -= num_bytes


class _Held:
    """A tensor that autograd keeps; when autograd lets go of it, it is counted off."""

    def __init__(self, kept: _Kept, tensor: Tensor, address: int, num_bytes: int) -> None:
        self.tensor = tensor.detach()
        self._kept, self._address, self._num_bytes = kept, address, num_bytes
        kept.begin(address, num_bytes)

    def __del__(self) -> None:
        self._kept.end(self._address, self._num_bytes)


def _memory_of(tensor: Tensor) -> Tensor:
    """The plain tensor inside the wrappers of tensor parallelism."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.elem if isinstance(local, AsyncCollectiveTensor) else local


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
