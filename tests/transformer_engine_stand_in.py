"""A stand-in for Transformer Engine where no GPU is: its surface, its rules about scales, and torch's FP8 products.

Tests that use it show that the lab lends weights, exchanges scales and counts casts rightly, and uses names that the
real one has (`golden/transformer_engine.json`); what its kernels do only a GPU shows (`gpu/test_fp8.py`).
"""

import dataclasses
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.rank.fp8_library import Modules
from labkit.rank.fp8_linear import _Product
from labkit.rank.fp8_scaling import Scaling
from labkit.spec import Fp8

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "transformer_engine.json").read_text())
SURFACE = GOLDEN["surface"]


@dataclasses.dataclass
class FP8GlobalState:
    """What the modules share."""

    fp8_recipe: Any = None
    is_first_fp8_module: bool = False


class FP8GlobalStateManager:
    """Holds it."""

    quantization_state = FP8GlobalState()

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True once in every outermost autocast."""
        state = cls.quantization_state
        first, state.is_first_fp8_module = state.is_first_fp8_module, False
        return first


class Autocast:
    """Refuses what would make the real one communicate."""

    def __init__(self, **options: Any) -> None:
        assert set(options) <= set(SURFACE["autocast"])
        assert options["enabled"]
        self._recipe = options["recipe"]

    def __enter__(self) -> "Autocast":
        state = FP8GlobalStateManager.quantization_state
        state.fp8_recipe, state.is_first_fp8_module = self._recipe, True
        return self

    def __exit__(self, *_error: object) -> None:
        assert not torch.is_grad_enabled(), "it would update scales"
        FP8GlobalStateManager.quantization_state.fp8_recipe = None


class Linear(nn.Module):
    """Casts by the scales of its `fp8_meta`, and keeps amaxes there."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        assert set(options) <= set(SURFACE["Linear"])
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=options["device"], dtype=options["params_dtype"]))
        self.fp8_meta: dict[str, Any] = {}

    def init_fp8_metadata(self) -> None:
        """Once within an autocast."""
        recipe = FP8GlobalStateManager.quantization_state.fp8_recipe
        assert recipe is not None, "outside of autocast"
        if self.fp8_meta:
            return
        self._scaling = Scaling(recipe.meaning, ("one",), torch.device("cpu"))
        scale, amax = self._scaling.scale, torch.zeros(recipe.meaning.history, 3)
        self._scaling.amax = amax[0]
        self.fp8_meta["scaling_fwd"] = SimpleNamespace(scale=scale[:2], amax_history=amax[:, :2])
        self.fp8_meta["scaling_bwd"] = SimpleNamespace(scale=scale[2:], amax_history=amax[:, 2:])

    def forward(self, inp: Tensor) -> Tensor:
        """Returns [..., N]."""
        self.init_fp8_metadata()
        assert not FP8GlobalStateManager.is_first_fp8_module(), "its backward would update scales"
        y: Tensor = _Product.apply(inp, self.weight, None, self._scaling.of("one"), inp.dtype, 1.0)
        return y


class Format:
    """The two formats."""

    HYBRID = "hybrid"
    E4M3 = "e4m3"


def _recipe(name: str, recipe: str) -> Any:
    def make(**options: Any) -> SimpleNamespace:
        assert set(options) <= set(SURFACE[name])
        words = {"margin": "margin", "amax_history_len": "history", "amax_compute_algo": "amax", "fp8_format": "format"}
        meaning = Fp8(recipe=recipe, **{words[key]: value for key, value in options.items() if key in words})
        return SimpleNamespace(meaning=meaning, options=options)

    return make


def modules() -> Modules:
    """What `fp8_library.load` would give."""
    names = {"DelayedScaling": "delayed", "Float8CurrentScaling": "current", "Float8BlockScaling": "block"}
    assert hasattr(FP8GlobalStateManager, "quantization_state")
    assert {"quantization_state", "is_first_fp8_module"} <= set(SURFACE["FP8GlobalStateManager"])
    return Modules(
        SimpleNamespace(Linear=Linear, autocast=Autocast),
        SimpleNamespace(FP8GlobalState=FP8GlobalState, FP8GlobalStateManager=FP8GlobalStateManager),
        SimpleNamespace(Format=Format, **{name: _recipe(name, recipe) for name, recipe in names.items()}),
    )
