"""Asks Transformer Engine's own Python sources for numbers, without its CUDA core: `python <this> <package's folder>`.

The wheel cannot be imported without that core, so the few functions that matter are taken out of their files and run by
themselves. What they gave for one version is kept in `golden/transformer_engine.json`.
"""

import ast
import dataclasses
import importlib.util
import json
import sys
import typing
from pathlib import Path
from typing import Any

import torch

from labkit.rank import fp8_library
from labkit.spec import Fp8

AMAXES = [0.0, 1e-45, 1e-39, 1e-12, 0.5, 1.0, 3.0, 447.9, 448.0, 1000.0, 6e4, 3e38, float("inf")]
# Amaxes as steps see them: an outlier, an empty tensor, numbers that are none.
STEPS = [2.0, 3.5, 1.0, 900.0, 1.5, 0.0, 1.25, float("inf"), 1.0, float("nan"), 1e-44, 1.0, 1.0, 1.0, 1.0]
DELAYED = [
    (length, choice, margin, largest)
    for length in (1, 3, 8)
    for choice in ("max", "most_recent")
    for margin, largest in ((0, 448.0), (2, 57344.0))
]

CLASSES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
RECIPES = [
    Fp8(),
    Fp8(format="e4m3", history=3, amax="most_recent", margin=2),
    *(Fp8(recipe=recipe, format=form) for recipe in ("current", "block") for form in ("hybrid", "e4m3")),
]


def functions(path: Path, *names: str) -> dict[str, Any]:
    """The functions of a file, run without the rest of it and without their decorators."""
    tree = ast.parse(path.read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list = []
    space: dict[str, Any] = {"torch": torch} | {name: getattr(typing, name) for name in ("Tuple", "Optional", "Union")}
    exec(compile(ast.Module(body=found, type_ignores=[]), str(path), "exec"), space)
    return {name: space[name] for name in names}


def recipe_module(package: Path) -> Any:
    """The module of recipes by itself, which needs no CUDA."""
    spec = importlib.util.spec_from_file_location("te_recipe", package / "common" / "recipe" / "__init__.py")
    recipes = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recipes
    try:
        spec.loader.exec_module(recipes)
    finally:
        del sys.modules[spec.name]
    return recipes


def defaults(recipes: Any) -> dict[str, dict[str, Any]]:
    """What the recipes say of themselves."""
    found = {}
    for name in CLASSES:
        recipe = getattr(recipes, name)()
        values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
        plain = {key: value for key, value in values.items() if isinstance(value, int | str) and key != "fp8_dpa"}
        largest = recipe.fp8_format.value
        powers = (
            [getattr(recipe, f"fp8_quant_{part}").power_2_scale for part in ("fwd_inp", "fwd_weight", "bwd_grad")]
            if hasattr(recipe, "fp8_quant_fwd_inp")
            else []
        )
        found[name] = plain | {"largest": [largest.max_fwd, largest.max_bwd], "powers_of_two": powers}
    return found


def translated(recipes: Any) -> list[list[Any]]:
    """What each of RECIPES becomes: the class, and those of its fields that delayed scaling or a format decide."""
    found = []
    for recipe in (fp8_library.recipe_of(recipes, each) for each in RECIPES):
        names = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax")
        given = [getattr(recipe, name) for name in names if hasattr(recipe, name)]
        found.append([type(recipe).__name__, recipe.fp8_format.name, *given])
    return found


def surface(package: Path, recipes: Any) -> dict[str, list[str]]:
    """The names that `labkit.rank.fp8_library` relies on: parameters of functions, fields and methods of classes."""
    linear = members(package / "pytorch" / "module" / "linear.py", "Linear")
    base = members(package / "pytorch" / "module" / "base.py", "TransformerEngineBaseModule")
    quantization = package / "pytorch" / "quantization.py"
    return {
        "Linear": parameters(linear["__init__"]),
        "Linear.forward": parameters(linear["forward"]),
        "Linear.init_fp8_metadata": parameters(base["init_fp8_metadata"]),
        "autocast": parameters(members(quantization, "autocast")["__init__"]),
        "FP8GlobalStateManager": sorted(members(quantization, "FP8GlobalStateManager")),
        "FP8GlobalState": sorted(members(quantization, "FP8GlobalState")),
    } | {name: [field.name for field in dataclasses.fields(getattr(recipes, name))] for name in CLASSES}


def members(path: Path, name: str) -> dict[str, Any]:
    """The methods and fields of a class of a file."""
    (found,) = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    methods = {part.name: part for part in found.body if isinstance(part, ast.FunctionDef)}
    assigned = [part.targets[0] for part in found.body if isinstance(part, ast.Assign)]
    annotated = [part.target for part in found.body if isinstance(part, ast.AnnAssign)]
    return methods | {target.id: target for target in (*assigned, *annotated)}


def parameters(method: ast.FunctionDef) -> list[str]:
    """The names of a method's parameters."""
    return [argument.arg for argument in method.args.args[1:]]


def delayed(package: Path) -> list[list[str]]:
    """The scale after each step, for every case of DELAYED."""
    source = package / "pytorch" / "quantization.py"
    names = ("_update_amax_history", "_default_get_amax_and_update_history", "_default_sf_compute")
    taken = functions(source, *names)
    space = taken[names[1]].__globals__
    space |= taken
    found = []
    for length, choice, margin, largest in DELAYED:
        history, scale = torch.zeros(length, 1), torch.ones(1)
        scales = []
        for amax in STEPS:
            history[0] = amax
            history, chosen = taken[names[1]](history, choice)
            scale = taken[names[2]](chosen, scale, largest, margin)
            scales.append(scale.item().hex())
        found.append(scales)
    return found


def scales(package: Path) -> dict[str, list[str]]:
    """The scale of each of AMAXES in current scaling, and as powers of two in block scaling."""
    source = package / "pytorch" / "custom_recipes" / "reference_current_scaling.py"
    scale = functions(source, "_scale_from_amax_tensor")["_scale_from_amax_tensor"]
    found = {}
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        for power in (False, True):
            values = scale(torch.float32, torch.tensor(AMAXES), dtype, eps=0.0, pow_2_scales=power)[0]
            found[f"{name}, {'powers of two' if power else 'any'}"] = [value.hex() for value in values.tolist()]
    return found


def reference(package: Path) -> dict[str, Any]:
    """All numbers."""
    recipes = recipe_module(package)
    return {
        "defaults": defaults(recipes),
        "delayed": delayed(package),
        "scales": scales(package),
        "translated": translated(recipes),
        "surface": surface(package, recipes),
    }


if __name__ == "__main__":
    print(json.dumps(reference(Path(sys.argv[1])), indent=1))
