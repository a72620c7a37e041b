"""The one live training state of this process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.rank import groups
from labkit.rank.fp8_scaling import Scaling
from labkit.rank.mesh import Mesh
from labkit.rank.recorder import Recorder
from labkit.spec import Training


class Held(Protocol):
    """This rank's weights, whatever engine holds them."""

    mesh: Mesh

    def gather(self) -> dict[str, Tensor]:
        """Return every parameter of the whole model, whole, on every member rank."""


class Settings(Protocol):
    """An optimizer, as far as its settings go."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The settings."""


class Update(Protocol):
    """What comes after the backward: norm, clipping, the optimizer's step."""

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared global gradient norm; 0 where the engine tells the norm after its update."""

    def apply(self, norm: float, clip_norm: float | None) -> float:
        """Update the weights.

        Args:
            norm: the global gradient norm, from all ranks' shares.
            clip_norm: the largest norm, or None.

        Returns:
            The global gradient norm before clipping. Where it is not finite, weights are those before the step.
        """

    def close(self) -> None:
        """Let go of what the engine holds outside the state."""


@dataclass(slots=True, kw_only=True)
class State:
    """Everything that a run goes on with.

    Attributes:
        plan: the plan it was built for.
        optimizer_kind: "adamw" or "sgd".
        weights: parameters, for torch's engine as local tensors (`parameters.Weights`).
        optimizer: over those.
        forward_backward: runs a step's micro-batches; returns this rank's share of the loss.
        update: what comes after it.
        recorder: what the modules record into.
        scaling: the scales of FP8 tensors; None in other precisions.
        step: steps done, which is also the position in the data: a step's samples depend on its number.
    """

    plan: Plan
    optimizer_kind: str
    weights: Held
    optimizer: Settings
    forward_backward: Callable[[Tensor, Tensor], Tensor]
    update: Update
    recorder: Recorder
    scaling: Scaling | None
    step: int


@dataclass(slots=True)
class _Slot:
    state: State | None = None
    why_none: str = "this rank has trained nothing since it started"


_slot = _Slot()


def keep(state: State) -> None:
    """Make `state` the live one."""
    _slot.state = state


def end(why: str) -> None:
    """Drop the live state; `why` is what a later `start='live'` says."""
    if _slot.state is not None:
        _slot.state.recorder.close()
        _slot.state.update.close()
    _slot.state = None
    _slot.why_none = why


def current() -> State:
    """Return the live state.

    Raises:
        PlanError: there is none.
    """
    if _slot.state is None:
        raise PlanError(f"there is no live training state: {_slot.why_none}. Begin one: train with start='fresh'.")
    return _slot.state


def resume(plan: Plan, training: Training) -> State:
    """Return the live state for a run that goes on with it.

    Raises:
        PlanError: there is none, or it belongs to another plan or optimizer.
    """
    state = current()
    if state.plan != plan:
        differs = "model" if state.plan.model != plan.model else f"layout '{state.plan.layout}'"
        asked = "another model" if state.plan.model != plan.model else f"'{plan.layout}'"
        raise PlanError(
            f"the live training state has {differs}, not {asked}: start='live' goes on under the same plan. "
            "Use that plan, start='fresh', or first lk.launch.switch, which lays the state out anew for another layout."
        )
    if state.optimizer_kind != training.optimizer:
        raise PlanError(
            f"the live training state has optimizer={state.optimizer_kind!r}, not {training.optimizer!r}: start='live' "
            f"goes on with the optimizer's state. Use optimizer={state.optimizer_kind!r} or start='fresh'."
        )
    return state


def _lose_groups() -> None:
    if _slot.state is not None:
        end("the ranks' groups were built anew, by an interrupt or a restart")


groups.on_tear_down(_lose_groups)
