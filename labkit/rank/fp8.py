"""FP8 in a training state: which matrices there are, their scales, and what is reported of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.rank import fp8_library, groups, report
from labkit.rank.fp8_linear import Fp8Linear
from labkit.rank.fp8_scaling import Scaling
from labkit.rank.fp8_tally import Tally
from labkit.rank.mesh import Mesh
from labkit.rank.recorder import Recorder
from labkit.spec import Fp8, Training
from labkit.spec.fp8 import CHOSEN, FORMATS, RECIPES

_WORDS = (RECIPES, FORMATS, CHOSEN)


def attach(
    stages: Sequence[nn.Module], plan: Plan, training: Training, own: Mesh, recorder: Recorder
) -> Scaling | None:
    """Give this rank's FP8 matrices their scales; None where the layout has another precision."""
    if plan.layout.precision != "fp8":
        return None
    scaling = Scaling(_recipe(training), names(stages, plan), groups.device(), recorder=recorder, members=own.members)
    for name, module in (pair for stage in stages for pair in stage.named_modules()):
        if isinstance(module, Fp8Linear):
            module.casts = scaling.of(name)
            scaling.shapes[name] = (module.in_features, module.out_features)
    return scaling


def names(stages: Sequence[nn.Module], plan: Plan) -> list[str]:
    """Every FP8 matrix of the whole model: all layers have those of the first one here."""
    here = [name for name, module in stages[0].named_modules() if isinstance(module, Fp8Linear)]
    first = here[0].split(".")[1]
    within = [name.split(".", 2)[2] for name in here if name.split(".")[1] == first]
    return [f"layers.{layer}.{matrix}" for layer in range(plan.model.num_layers) for matrix in within]


def adjust(scaling: Scaling | None, plan: Plan, training: Training, own: Mesh, recorder: Recorder) -> None:
    """Ready a state for a run: choose what multiplies, record or not.

    Runs on: the layout's ranks at once. Communicates: as `fp8_library.choose`, where nothing is chosen yet.

    Raises:
        PlanError: the run asks for another recipe than the state has.
    """
    if scaling is None:
        return
    if scaling.recipe != _recipe(training) and scaling.is_fresh:
        scaling.become(_recipe(training))
    if scaling.recipe != _recipe(training):
        raise PlanError(
            f"the live training state has {scaling.recipe}, not {_recipe(training)}: start='live' goes on with the "
            "scales that it has. Use that recipe or start='fresh'."
        )
    if scaling.library is None:
        scaling.library, scaling.why_torch = fp8_library.choose(
            plan, scaling.recipe, scaling.shapes, scaling.names, groups.device(), own.members
        )
    last = plan.layout.num_microbatches - 1
    scaling.tally = Tally(scaling.names, groups.device(), recorder, last) if training.record_fp8 else None


def products(scaling: Scaling | None) -> AbstractContextManager[None]:
    """The context of a step's forwards and backwards."""
    if scaling is None or scaling.library is None:
        return nullcontext()
    return scaling.library.step(scaling.scale, scaling.amax)


def library(scaling: Scaling | None) -> str | None:
    """What multiplied: "transformer_engine", or "torch" and why; None in other precisions."""
    if scaling is None:
        return None
    return f"torch: {scaling.why_torch}" if scaling.library is None else fp8_library.NAME


def carry(old: Scaling | None, new: Scaling | None, *, precisions: tuple[str, str]) -> None:
    """Take recipe and scales along to another layout; a state that had none begins with those of a fresh one.

    Runs on: every rank of the world at once. Communicates: two broadcasts from rank 0, which is in every layout, where
    both layouts are FP8.

    Args:
        old: of this rank under the layout before; None where it had no part.
        new: likewise after.
        precisions: of the two layouts.
    """
    if precisions != ("fp8", "fp8") or dist.get_world_size() == 1:
        if old is not None and new is not None:
            new.become(old.recipe)
            new.load(old.state())
        return
    source = old if dist.get_rank() == 0 else None
    device = groups.device()
    facts = torch.tensor(_written(source) if source is not None else [0] * 6, device=device)
    dist.broadcast(facts, src=0)
    recipe, num_tensors = _read(facts.tolist())
    depth = recipe.history if recipe.recipe == "delayed" else 1
    table = torch.zeros(depth + 1, num_tensors, device=device)
    if source is not None:
        table = torch.cat([source.history, source.scale[None]])
    dist.broadcast(table, src=0)
    if new is not None:
        new.become(recipe)
        new.load({"history": table[:-1], "scale": table[-1]})


def _written(scaling: Scaling) -> list[int]:
    """A recipe as numbers, and how many tensors it scales."""
    recipe = scaling.recipe
    words = [
        options.index(word) for options, word in zip(_WORDS, (recipe.recipe, recipe.format, recipe.amax), strict=True)
    ]
    return [*words, recipe.history, recipe.margin, scaling.scale.numel()]


def _read(facts: list[int]) -> tuple[Fp8, int]:
    recipe, form, amax = (options[index] for options, index in zip(_WORDS, facts[:3], strict=True))
    return Fp8(recipe=recipe, format=form, amax=amax, history=facts[3], margin=facts[4]), facts[5]


def end_step(scaling: Scaling | None, own: Mesh, step: int) -> None:
    """Take the next step's scales from this one, and tell the notebook what was recorded.

    Runs on: the layout's ranks at once. Communicates: one all-reduce of amaxes in delayed scaling, two to record.
    """
    if scaling is None:
        return
    if scaling.tally is not None:
        rows = scaling.tally.take(own.members)
        if own.rank == 0:
            report.emit("fp8", {"step": step, "rows": rows})
    scaling.end_step()


def _recipe(training: Training) -> Fp8:
    return training.fp8 or Fp8()
