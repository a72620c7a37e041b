"""What a live state holds for every element, by the parameter's name: read, and filled, for a change of layout."""

from typing import Protocol, cast

import torch
from torch import Tensor

from labkit.plan.moves import STATES, WEIGHT
from labkit.rank.optimizer import Sharded
from labkit.rank.parameters import Weights
from labkit.rank.state import State


class Contents(Protocol):
    """This rank's part of a state, one parameter and quantity at a time.

    A quantity is "weight" or one of the optimizer's states. A part is flat: the elements of the boxes that
    `labkit.plan.shards` says this rank holds, one box after the other. All members of the layout ask for the same keys
    in the same order, as far as they hold them, so that an implementation may communicate among them.
    """

    def read(self, key: str, quantity: str) -> Tensor:
        """Return this rank's part; it may share the state's memory and is not written to."""

    def room(self, key: str, quantity: str) -> Tensor:
        """Return memory for this rank's part, which the caller fills."""

    def filled(self, key: str, quantity: str, part: Tensor) -> None:
        """Take a part that the caller has filled: what `room` returned."""

    def num_updates(self) -> dict[str, float]:
        """How often the optimizer has updated each parameter; empty where it does not count."""

    def set_num_updates(self, counts: dict[str, float]) -> None:
        """Take over the counts of another state."""


class TorchContents:
    """The contents of a state that torch's optimizers update: its own tensors, nothing is copied.

    Args:
        state: the state.
        fresh: whether it has never taken a step: memory for the optimizer's states is then made.
    """

    def __init__(self, state: State, *, fresh: bool = False) -> None:
        weights, made = cast(Weights, state.weights), cast(Sharded, state.optimizer)
        self._tensors = weights.tensors
        parts = [part for group in made.param_groups for part in group["params"]]
        self._parts = dict(zip(self._tensors, parts, strict=True))
        self._states = made.state
        self._counts = "step" if STATES[state.optimizer_kind] else ""
        if fresh:
            for part in parts if self._counts else ():
                self._states[part] = {name: torch.empty_like(part) for name in STATES[state.optimizer_kind]}

    def read(self, key: str, quantity: str) -> Tensor:
        """This rank's part, as it is."""
        if quantity == WEIGHT:
            return self._tensors[key].detach().view(-1)
        kept = self._states.get(self._parts[key])
        if not kept:  # never updated: AdamW begins with zeros
            return torch.zeros_like(self._parts[key]).view(-1)
        found: Tensor = kept[quantity]
        return found.view(-1)

    def room(self, key: str, quantity: str) -> Tensor:
        """The state's own memory."""
        return self.read(key, quantity)

    def filled(self, key: str, quantity: str, part: Tensor) -> None:
        """Nothing to do: the part is the state's own memory."""

    def num_updates(self) -> dict[str, float]:
        """AdamW's step of each parameter."""
        if not self._counts:
            return {}
        kept = {key: self._states.get(part) or {} for key, part in self._parts.items()}
        return {key: float(one.get(self._counts, 0.0)) for key, one in kept.items()}

    def set_num_updates(self, counts: dict[str, float]) -> None:
        """Set AdamW's step of each parameter."""
        for key, part in self._parts.items() if self._counts else ():
            self._states[part][self._counts] = torch.tensor(counts[key], dtype=torch.float32, device=part.device)


class Nothing:
    """The contents on a rank that has no part in the layout."""

    def read(self, key: str, quantity: str) -> Tensor:
        """Never asked."""
        raise KeyError(key)

    def room(self, key: str, quantity: str) -> Tensor:
        """Never asked."""
        raise KeyError(key)

    def filled(self, key: str, quantity: str, part: Tensor) -> None:
        """Never asked."""

    def num_updates(self) -> dict[str, float]:
        """None."""
        return {}

    def set_num_updates(self, counts: dict[str, float]) -> None:
        """Nothing is kept."""
