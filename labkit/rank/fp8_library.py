"""Transformer Engine's linear layers and recipes, which multiply in FP8 where a GPU and an installation have them.

Read from the sources of 2.20. Its layers stand here without weights: each product lends them this rank's local ones, so
masters stay fp32 and names, splits, wrappers, norms and gathers are those of torch's own layers. Gradients of weights
are rounded to bf16, as torch's are under autocast. A weight is cast anew in every micro-batch (`is_first_microbatch`
stays None): a copy kept for a step would be one more state to keep right.

Left to itself, Transformer Engine updates the scales of delayed scaling at the end of each outermost `te.autocast` and
in the backward of the first layer, by an all-reduce of all its tensors over one group. Stages of a pipeline hold other
tensors, and the last one would wait for the first in the middle of a step: it would never end. So here the whole step
is one `te.autocast` that updates nothing; amaxes are taken out of it, and `Scaling` agrees on them over all ranks of
the layout and computes the scales, with the same formulas.
"""

import functools
import importlib
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

from labkit.plan import Plan
from labkit.spec import Fp8
from labkit.spec.fp8 import ROLES

NAME = "transformer_engine"


class Modules(NamedTuple):
    """The modules of Transformer Engine that are used."""

    pytorch: Any
    quantization: Any
    recipe: Any


@functools.cache
def load() -> Modules | str:
    """Import Transformer Engine, or say why not: its plain wheel raises several things without its CUDA core."""
    paths = ("pytorch", "pytorch.quantization", "common.recipe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Modules(*(importlib.import_module(f"{NAME}.{path}") for path in paths))
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == NAME:
                return "Transformer Engine is not installed"
            why = textwrap.shorten(str(error), 100, placeholder=" ...")
            return f"Transformer Engine cannot be imported ({type(error).__name__}: {why})"


def why_not(plan: Plan, fp8: Fp8, device: torch.device) -> str:
    """Why this rank cannot use Transformer Engine's layers for a plan; empty where it can."""
    if device.type != "cuda":
        return "ranks compute on the CPU"
    if plan.layout.pp > 1 and any(action.kind in ("I", "W") for line in plan.actions for action in line):
        return f"{plan.layout.schedule} splits backwards in two, and Transformer Engine's layers compute theirs whole"
    modules = load()
    if isinstance(modules, str):
        return modules
    kind = "fp8_block_scaling" if fp8.recipe == "block" else "fp8"
    is_there, why = getattr(modules.pytorch, f"is_{kind}_available")(return_reason=True)
    return "" if is_there else str(why).rstrip(".")


def choose(
    plan: Plan,
    fp8: Fp8,
    shapes: Mapping[str, tuple[int, int]],
    names: Sequence[str],
    device: torch.device,
    members: dist.ProcessGroup | None,
) -> "tuple[Library | None, str]":
    """Return the library, or None and the reason; the same on all ranks, for it decides where they communicate.

    Runs on: the layout's ranks at once. Communicates: on GPUs an all-reduce of one number.

    Args:
        plan: the layout.
        fp8: the recipe.
        shapes: this rank's matrices and how many features go in and come out of each.
        names: all matrices of the model, in the order of their scales.
        device: this rank's.
        members: all ranks of the layout; None where there is only one.
    """
    why = why_not(plan, fp8, device)
    if device.type == "cuda" and members is not None:
        num_without = torch.tensor(float(bool(why)), device=device)
        dist.all_reduce(num_without, group=members)
        if not why and num_without.item():
            why = f"{num_without.item():.0f} of {plan.world_size} ranks cannot use Transformer Engine"
    modules = why or load()
    if isinstance(modules, str):
        return None, why
    return Library(modules, fp8, shapes, names, device, drops_weights=plan.layout.zero_stage == 3), ""


def recipe_of(recipe: Any, fp8: Fp8) -> Any:
    """The recipe of Transformer Engine that means what `fp8` says; `recipe` is its module of recipes."""
    form = recipe.Format.HYBRID if fp8.format == "hybrid" else recipe.Format.E4M3
    if fp8.recipe == "delayed":
        return recipe.DelayedScaling(
            margin=fp8.margin,
            fp8_format=form,
            amax_history_len=fp8.history,
            amax_compute_algo=fp8.amax,
            reduce_amax=False,
        )
    return (recipe.Float8CurrentScaling if fp8.recipe == "current" else recipe.Float8BlockScaling)(fp8_format=form)


class Library:
    """One layer of Transformer Engine for each FP8 matrix of this rank, under one recipe.

    Args:
        modules: what `load` gave.
        fp8: the recipe.
        shapes: as for `choose`.
        names: as for `choose`.
        device: where the scales live.
        drops_weights: whether weights are dropped after their forward (ZeRO 3): then no FP8 copy is kept for the
            backward either, which casts again.
    """

    def __init__(
        self,
        modules: Modules,
        fp8: Fp8,
        shapes: Mapping[str, tuple[int, int]],
        names: Sequence[str],
        device: torch.device,
        *,
        drops_weights: bool,
    ) -> None:
        self._modules, self._is_delayed = modules, fp8.recipe == "delayed"
        self._recipe = recipe_of(modules.recipe, fp8)
        # Of our own: what others registered would be updated with ours, over groups that may be gone.
        self._state = modules.quantization.FP8GlobalState()
        self._layers = {
            name: modules.pytorch.Linear(*shape, bias=False, params_dtype=torch.float32, device="meta")
            for name, shape in shapes.items()
        }
        for layer in self._layers.values() if drops_weights else ():
            layer._is_fsdp2 = True  # what its layers find out by themselves where FSDP2 wraps them
        first = torch.tensor([len(ROLES) * names.index(name) for name in shapes], device=device)
        self._columns = (first[:, None] + torch.arange(len(ROLES), device=device)).flatten()

    def product(self, name: str, x: Tensor, weight_NK: Tensor) -> Tensor:
        """Return `x W^T` for a matrix; differentiable."""
        y: Tensor = functional_call(self._layers[name], {"weight": weight_NK}, (x,))
        return y

    @contextmanager
    def step(self, scale: Tensor, amax: Tensor) -> Iterator[None]:
        """Forwards and backwards of a step happen within it.

        Args:
            scale: of every tensor of the model, those that delayed scaling casts with.
            amax: raised by what the step saw of this rank's tensors.
        """
        manager = self._modules.quantization.FP8GlobalStateManager
        others, manager.quantization_state = manager.quantization_state, self._state
        context = self._modules.pytorch.autocast(enabled=True, recipe=self._recipe)
        try:
            context.__enter__()
            try:
                manager.is_first_fp8_module()  # told once only: no layer takes itself for the first and updates
                if self._is_delayed:
                    self._write(scale)
                yield
                if self._is_delayed:
                    seen = torch.cat(self._amaxes())
                    amax[self._columns] = torch.maximum(amax[self._columns], seen)
            finally:
                with torch.no_grad():  # it updates where gradients are on
                    context.__exit__(None, None, None)
        finally:
            manager.quantization_state = others

    def _write(self, scale: Tensor) -> None:
        for layer in self._layers.values():
            layer.init_fp8_metadata()  # the first time; else nothing
        targets = [state.scale[:number] for state, number in self._states()]
        torch._foreach_copy_(targets, list(scale[self._columns].split([len(target) for target in targets])))
        torch._foreach_zero_(self._amaxes())

    def _amaxes(self) -> list[Tensor]:
        return [state.amax_history[0, :number] for state, number in self._states()]

    def _states(self) -> list[tuple[Any, int]]:
        """What holds scales and amaxes, and how many of them count: input and weight, and the output's gradient."""
        metas = (layer.fp8_meta for layer in self._layers.values())
        return [pair for meta in metas for pair in ((meta["scaling_fwd"], 2), (meta["scaling_bwd"], 1))]
