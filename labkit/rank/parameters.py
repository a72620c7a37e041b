"""A stage's parameters: initialised by name, seen as plain local tensors, gathered whole again.

A tied matrix that two stages hold goes by the embedding's name on both; on a rank that holds both stages, the last
stage's copy keeps the head's name.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from labkit.plan import Plan
from labkit.plan.parameters import EMBEDDING, canonical
from labkit.rank.mesh import Mesh
from labkit.rank.model import Transformer
from labkit.spec import Model

INITIAL_STD = 0.02
_RESIDUAL = ("attention.output.weight", "feed_forward.down.weight")


def build_stage(plan: Plan, stage: int, seed: int | None, device: torch.device) -> Transformer:
    """Make a stage with its initial weights, which depend on seed and parameter name only.

    Matrices are normal with deviation 0.02, those that write to the residual stream 0.02 / sqrt(2 layers) (Radford et
    al. 2019); norms start at 1 and biases at 0. Without a seed the weights are whatever stood in memory: for a state
    that comes from elsewhere.
    """
    with torch.device("meta"):
        module = Transformer(plan.model, plan.layers(stage), plan.layout.precision, plan.layout.recompute)
    module.to_empty(device=device)
    module.tie()
    if seed is None:
        return module
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_initial(canonical(name, plan.model), parameter.shape, seed, plan.model))
    return module


def _initial(name: str, shape: torch.Size, seed: int, model: Model) -> Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"weights {seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std = INITIAL_STD / math.sqrt(2 * model.num_layers) if name.endswith(_RESIDUAL) else INITIAL_STD
    return torch.empty(shape).normal_(std=std, generator=generator)


class Weights:
    """This rank's parameters as plain tensors, and how many ranks hold the same elements.

    Everything after the backward (norm, clipping, optimizer) works on these: no DTensor is dispatched, and a global
    norm can count every element once, whatever the layout.

    Args:
        modules: this rank's stages, after tensor and data parallelism were applied.
        plan: their plan.
        mesh: this rank's groups.
        split: the parameters split over tp -> along which dimension.

    Attributes:
        tensors: canonical name -> local tensor, sharing the parameter's memory.
    """

    def __init__(self, modules: Sequence[nn.Module], plan: Plan, mesh: Mesh, split: Mapping[str, int]) -> None:
        self.plan = plan
        self.mesh = mesh
        self._split = {canonical(name, plan.model): dim for name, dim in split.items()}
        self._parameters: dict[str, nn.Parameter] = {}
        self.tensors: dict[str, Tensor] = {}
        for own_name, parameter in (pair for module in modules for pair in module.named_parameters()):
            name = canonical(own_name, plan.model)
            if name in self.tensors:
                name = own_name
            self._parameters[name] = parameter
            self.tensors[name] = _local(parameter).detach() if isinstance(parameter, DTensor) else parameter
        self._num_holders = {name: self._count_holders(name) for name in self.tensors}

    def _count_holders(self, name: str) -> int:
        layout = self.plan.layout
        num_copies = layout.hybrid if layout.zero_stage >= 2 else layout.dp
        held_by = num_copies * (1 if canonical(name, self.plan.model) in self._split else layout.tp)
        return held_by * 2 if self._has_twin(name) else held_by

    def _has_twin(self, name: str) -> bool:
        """Whether the first and last stage both hold this parameter."""
        return canonical(name, self.plan.model) == EMBEDDING and self.plan.has_twin

    def collect_gradients(self) -> dict[str, Tensor]:
        """Bring the gradients of the backward to `tensors`; a matrix held by two stages gets the sum of both.

        Communicates: one all-reduce between the ends of the pipeline, where they share a matrix and are two ranks.
        """
        gradients = {}
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
                    gradient = gradient.redistribute(placements=parameter.placements)
                gradient = _local(gradient)
                self.tensors[name].grad = gradient
            gradients[name] = gradient
        twins = [gradient for name, gradient in gradients.items() if self._has_twin(name)]
        if self.mesh.ends is not None and twins:
            dist.all_reduce(twins[0], group=self.mesh.ends)
        elif len(twins) == 2:
            twins[0].add_(twins[1])
            twins[1].copy_(twins[0])
        return gradients

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for tensor in self.tensors.values():
            tensor.grad = None

    def squared_norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """This rank's share of the squared global norm: shares of all ranks add up to it. A scalar on the device."""
        by_holders: dict[int, list[Tensor]] = {}
        for name, gradient in gradients.items():
            by_holders.setdefault(self._num_holders[name], []).append(gradient)
        shares = [
            torch.stack(torch._foreach_norm(group)).square().sum() / num_holders
            for num_holders, group in by_holders.items()
        ]
        return torch.stack(shares).sum()

    def gather(self) -> dict[str, Tensor]:
        """Return every parameter of the whole model, whole, on every member rank.

        Runs on: all member ranks at once. Communicates: all-gathers over tp and dp, broadcasts over pp.
        """
        whole = {}
        for stage in range(self.plan.num_stages):
            with torch.device("meta"):
                outline = Transformer(self.plan.model, self.plan.layers(stage))
            for local_name, parameter in outline.named_parameters():
                name = canonical(local_name, self.plan.model)
                if name not in whole:
                    whole[name] = self._whole(name, parameter.shape, stage)
        return whole

    def _whole(self, name: str, shape: torch.Size, stage: int) -> Tensor:
        mesh, layout = self.mesh, self.plan.layout
        pp_rank = self.plan.pp_rank_of(stage)
        if mesh.place.pp_rank == pp_rank:
            parameter = self._parameters[name]
            tensor = _whole_tensor(parameter) if isinstance(parameter, DTensor) else parameter
            tensor = tensor.detach().clone()
        else:
            tensor = torch.empty(shape, device=next(iter(self.tensors.values())).device)
        if layout.pp > 1:
            owner = self.plan.rank_at(dp_rank=mesh.place.dp_rank, tp_rank=mesh.place.tp_rank, pp_rank=pp_rank)
            dist.broadcast(tensor, src=owner, group=mesh.group("pp"))
        return tensor


def _whole_tensor(tensor: DTensor) -> Tensor:
    """The whole of a sharded tensor, axis by axis: torch warns when it must do several at once."""
    placements = list(tensor.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _local(tensor: DTensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local()
