"""Trials of a sharded optimizer step: gradients in, weights out, what was sent, and what is kept between steps."""

import gc
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit.rank.trials.attempt import as_plain, device
from labkit.rank.trials.traffic import Traffic

__all__ = ["gradients", "weights", "zero1_step"]


def weights(size: int, seed: int) -> torch.Tensor:
    """The weights before the first step, from 0.5 to 4, so that a step of the learning rate is small beside each."""
    return ((torch.arange(size, dtype=torch.int64) * 11 + seed) % 29 + 4).to(torch.float32) / 8


def gradients(rank: int, size: int, seed: int, step: int, scale: float) -> torch.Tensor:
    """A member's gradients at a step: whole multiples of `scale`, which the judge chooses so that means are exact."""
    index = torch.arange(size, dtype=torch.int64)
    return ((index * 7 + rank * 5 + step * 3 + seed) % 17 - 6).to(torch.float32) * scale


def zero1_step(
    answers: Mapping[str, Callable[..., Any]],
    group: dist.ProcessGroup,
    *,
    size: int,
    seed: int,
    num_steps: int,
    scale: float,
    adamw: Mapping[str, Any],
) -> dict[str, Any]:
    """Have the answer take some steps; returns the weights, the communication and the numbers kept after each.

    Runs on: every member. Communicates: what the answer does. Shapes: weights and gradients `[size]`.
    """
    (answer,) = answers.values()
    weights_n = weights(size, seed).to(device())
    state: dict[str, Any] = {}
    # Where an answer can keep something: what it is given for that, itself, and the variables of its cell.
    roots = [state, answer, getattr(answer, "__globals__", None)]
    before = _tensors(roots)
    steps = []
    for step in range(num_steps):
        gradients_n = gradients(dist.get_rank(group), size, seed, step, scale).to(device())
        with Traffic() as traffic:
            answer(weights_n, gradients_n, state, group, dict(adamw))
        kept = _num_kept(roots, [*before, weights_n, gradients_n])
        steps.append({"weights": as_plain(weights_n), "calls": traffic.calls, "kept": kept})
    return {"steps": steps}


def _num_kept(roots: Iterable[Any], given: Iterable[torch.Tensor]) -> int:
    """Numbers in the tensors that are reached from `roots`, besides those `given`, and without step counters.

    A view counts with the whole tensor that it keeps alive. The gradient of a parameter is no state and does not count,
    though PyTorch keeps it until the next step.
    """
    sizes, known = {}, {_storage(one) for one in given}
    for one in _tensors(roots):
        if one.dim() > 0:
            sizes[_storage(one)] = one.untyped_storage().nbytes() // one.element_size()
        if one.is_leaf and one.grad is not None:
            known.add(_storage(one.grad))
    return sum(size for storage, size in sizes.items() if storage not in known)


def _tensors(roots: Iterable[Any]) -> list[torch.Tensor]:
    """Ordinary tensors that are reached from `roots` through containers, attributes, closures and caches.

    Not all that live: a backend may hold the tensors of a collective for a moment longer than the collective takes.
    """
    seen: set[int] = set()
    found, waiting = [], list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or issubclass(type(one), type | types.ModuleType):
            continue
        seen.add(id(one))
        if type(one) is types.FunctionType:
            waiting += [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]
            continue
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout == torch.strided:
            found.append(one)
        waiting += gc.get_referents(one)
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
