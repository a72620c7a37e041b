"""What a rank keeps in a step, weighed on live ranks: activations, weights, gradients, optimizer states."""

from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.errors import PlanError
from labkit.plan import Plan

if TYPE_CHECKING:
    from labkit.cluster import Ranks

__all__ = ["States", "activations", "states"]

MOST_KEPT = "labkit.rank.keeping:most_kept"
STATES_HELD = "labkit.rank.keeping:states_held"
STEP_TIMEOUT_S = 600.0


class States(NamedTuple):
    """Bytes that a rank keeps between steps; `plan.holding` counts elements, over the step.

    Attributes:
        parameters: of weights, after a step: shards, also where they are whole from a forward to its backward.
        gradients: just before the optimizer uses them.
        optimizer: of AdamW's two averages.
    """

    parameters: int
    gradients: int
    optimizer: int


def activations(ranks: "Ranks", plan: Plan, *, timeout_s: float = STEP_TIMEOUT_S) -> list[int]:
    """Train one step from fresh weights, and see the most bytes of activations that each rank keeps at any moment.

    Asked is autograd itself: every tensor that a forward saves for its backward, each storage once, without weights.
    The ranks' live training state is then that of this step.

    Args:
        ranks: the ranks; the first `plan.world_size` take part.
        plan: what `plan.build` gave.
        timeout_s: how long the step may take.

    Returns:
        Bytes, for each rank of the plan.

    Raises:
        PlanError: the plan takes more ranks than there are, or an engine that saves by itself.
    """
    return [int(num_bytes) for num_bytes in _on_each(ranks, MOST_KEPT, plan, timeout_s)]


def states(ranks: "Ranks", plan: Plan, *, timeout_s: float = STEP_TIMEOUT_S) -> list[States]:
    """Train one step of AdamW from fresh weights, and weigh what each rank keeps of the model's states.

    The ranks' live training state is then that of this step.

    Args:
        ranks: the ranks; the first `plan.world_size` take part.
        plan: what `plan.build` gave.
        timeout_s: how long the step may take.

    Returns:
        Bytes, for each rank of the plan.

    Raises:
        PlanError: the plan takes more ranks than there are, or an engine that keeps its states elsewhere.
    """
    return [States(*found) for found in _on_each(ranks, STATES_HELD, plan, timeout_s)]


def _on_each(ranks: "Ranks", function: str, plan: Plan, timeout_s: float) -> list[Any]:
    """What the plan's ranks answer."""
    if plan.world_size > len(ranks):
        raise PlanError(
            f"layout '{plan.layout}' takes {plan.world_size} ranks but {len(ranks)} are up: each rank has one place in "
            f"the mesh. Start {plan.world_size} ranks or change an axis."
        )
    if plan.engine != "torch":
        raise PlanError(
            f"layout '{plan.layout}' is run by engine {plan.engine!r}: only torch's steps are weighed. "
            f"Add 'torch' to the layout."
        )
    return [found for found in ranks.run(function, plan, timeout_s=timeout_s) if found is not None]
