"""What a live state that DeepSpeed updates holds for every element: read and filled, without DeepSpeed's collectives.

DeepSpeed 0.19.8 keeps fp32 weights and optimizer states in flat tensors: at stages 1 and 2 one whose parts go to the
ranks, beside whole weights on every rank; at stage 3 a part of each parameter in each. Where the parts of a parameter
begin is DeepSpeed's own record; which elements they are, `labkit.plan.shards` says for all ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.plan.moves import STATES, WEIGHT
from labkit.rank import groups
from labkit.rank.state import State


class _Place(NamedTuple):
    """Where a flat tensor holds this rank's part of a parameter."""

    flat: Tensor
    start: int
    num_elements: int

    def of(self, like: Tensor) -> Tensor:
        """That part of a tensor that is laid out as `flat`."""
        return like.detach().view(-1).narrow(0, self.start, self.num_elements)


class DeepSpeedContents:
    """The contents of a state on DeepSpeed.

    Args:
        state: the state.
        fresh: whether it has never taken a step: memory for the optimizer's states is then made.
    """

    def __init__(self, state: State, *, fresh: bool = False) -> None:
        engine = state.weights.engine  # type: ignore[attr-defined]
        self._parameters: dict[str, Any] = state.weights.parameters  # type: ignore[attr-defined]
        self._stage = engine.zero_optimization_stage()
        self._zero = engine.optimizer
        self._states = engine.basic_optimizer.state
        self._counts_plainly = type(engine.basic_optimizer).__name__ == "DeepSpeedCPUAdam"
        self._names = STATES[state.optimizer_kind]
        if fresh and self._names:
            for flat in self._flats():
                self._states[flat] = {name: torch.zeros_like(flat) for name in self._names}

    def _flats(self) -> list[Tensor]:
        """What the optimizer updates."""
        if self._stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return list(self._zero.single_partition_of_fp32_groups if self._stage else self._parameters.values())

    def _place(self, key: str) -> _Place | None:
        """Where the optimizer has its part of a parameter; None where it has none on this rank."""
        parameter = self._parameters[key]
        if self._stage == 0:
            return _Place(parameter, 0, parameter.numel())
        if self._stage == 3:
            group, start, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
            left = parameter.ds_numel - self._zero._get_param_partition_rank(parameter) * size
            return _Place(self._zero.fp32_partitioned_groups_flat[group], start, max(0, min(size, left)))
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        address = mapping.get_hp_fragment_address()
        return _Place(
            self._zero.single_partition_of_fp32_groups[mapping.param_group_index], address.start, address.numel
        )

    def _part(self, key: str, quantity: str) -> Tensor:
        """This rank's part where DeepSpeed keeps it, which may be host memory."""
        if quantity == WEIGHT and self._stage < 3:
            return self._parameters[key].detach().view(-1)  # type: ignore[no-any-return]
        place = self._place(key)
        if place is None:
            return torch.empty(0)
        if quantity == WEIGHT:
            return place.of(place.flat)
        kept = self._states.get(place.flat)
        if not kept:  # never updated: AdamW begins with zeros
            return torch.zeros(place.num_elements)
        return place.of(kept[quantity])

    def read(self, key: str, quantity: str) -> Tensor:
        """This rank's part, on its device."""
        return self._part(key, quantity).to(groups.device())

    def room(self, key: str, quantity: str) -> Tensor:
        """The state's own memory, or a copy where that is not on the device."""
        return self.read(key, quantity)

    def filled(self, key: str, quantity: str, part: Tensor) -> None:
        """Bring the part to where DeepSpeed keeps it, and weights to all of their copies."""
        own = self._part(key, quantity)
        if own.device != part.device:
            own.copy_(part)
        if quantity != WEIGHT:
            return
        parameter: Any = self._parameters[key]
        if self._stage == 3:
            parameter.ds_tensor.data.view(-1)[: own.numel()].copy_(own)
        elif self._stage and parameter._hp_mapping is not None:
            parameter._hp_mapping.update_hp()

    def num_updates(self) -> dict[str, float]:
        """AdamW's step of each parameter of which this rank has a part."""
        if not self._names:
            return {}
        places = {key: self._place(key) for key in self._parameters}
        kept = {key: self._states.get(place.flat) or {} for key, place in places.items() if place is not None}
        return {key: float(one.get("step", 0.0)) for key, one in kept.items()}

    def set_num_updates(self, counts: dict[str, float]) -> None:
        """Set AdamW's step; DeepSpeed has one for all parameters that it keeps in one tensor."""
        for key in self._parameters if self._names else ():
            place = self._place(key)
            if place is not None:
                count = counts[key]
                step = torch.tensor(count, dtype=torch.float32, device=place.flat.device)
                self._states[place.flat]["step"] = int(count) if self._counts_plainly else step
