"""Transformer Engine's layers in place of torch's products: when they are chosen, and how they are used."""

import dataclasses
import importlib.util

import pytest
import torch

from labkit.plan import build
from labkit.rank import fp8_library
from labkit.rank.fp8_library import Library
from labkit.rank.fp8_linear import Fp8Linear
from labkit.rank.fp8_scaling import Scaling
from labkit.rank.fp8_tally import Tally
from labkit.rank.recorder import Recorder
from labkit.spec import Fp8, Layout, Model, Training
from tests import transformer_engine_library as library
from tests import transformer_engine_stand_in as stand_in
from tests.ranks import bare

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MODEL = Model(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, vocab_size=256, seq_len=16, bias=True)
RECIPES = {"delayed": Fp8(history=4), "current": Fp8(recipe="current"), "block": Fp8(recipe="block")}
LAYOUTS = ("tp2 sp m2", "pp2 m2 recompute:full", "dp2 zero3 recompute:full torch", "dp2 zero3 deepspeed")
NAMES = ("one", "two")


def why_not(text, fp8=RECIPES["delayed"], device=CUDA):
    model = dataclasses.replace(MODEL, num_layers=4)
    return fp8_library.why_not(build(model, Layout.parse(f"{text} fp8")), fp8, device)


@pytest.fixture
def loads_anew():
    fp8_library.load.cache_clear()
    yield
    fp8_library.load.cache_clear()


def test_torch_multiplies_on_a_cpu_and_where_a_schedule_splits_backwards():
    assert why_not("dp2", device=CPU) == "ranks compute on the CPU"
    for schedule in ("zbv v2", "interleaved_zero_bubble v2", "dualpipe_v v2"):
        assert "splits backwards in two" in why_not(f"pp2 {schedule} m4")
    assert "splits" not in why_not("pp2 interleaved v2 m4")


def test_torch_multiplies_where_transformer_engine_is_not_installed(loads_anew):
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("Transformer Engine is here")
    assert why_not("dp2") == "Transformer Engine is not installed"


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError('no CUDA core')",
        "FileNotFoundError('no CUDA core')",
        "ImportError('no CUDA core')",
        "AssertionError('no CUDA core')",
        "ModuleNotFoundError('no CUDA core', name='transformer_engine_torch')",
    ],
)
def test_torch_multiplies_where_transformer_engine_cannot_be_imported(error, tmp_path, monkeypatch, loads_anew):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = error.split("(")[0]
    assert why_not("dp2") == f"Transformer Engine cannot be imported ({name}: no CUDA core)"


def test_torch_multiplies_where_the_gpu_lacks_fp8(monkeypatch):
    modules = stand_in.modules()
    modules.pytorch.is_fp8_available = lambda return_reason: (True, "")
    modules.pytorch.is_fp8_block_scaling_available = lambda return_reason: (False, "FP8 block scaling is not there.")
    monkeypatch.setattr(fp8_library, "load", lambda: modules)
    assert why_not("dp2") == why_not("dp2", RECIPES["current"]) == ""
    assert why_not("dp2", RECIPES["block"]) == "FP8 block scaling is not there"


def test_a_recipe_means_what_transformer_engines_says():
    names = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
    for recipe, kept in zip(library.RECIPES, stand_in.GOLDEN["translated"], strict=True):
        given = [recipe.margin, recipe.history, recipe.amax, False] if recipe.recipe == "delayed" else []
        assert kept == [names[recipe.recipe], recipe.format.upper(), *given]


def test_the_names_that_are_used_are_transformer_engines():
    surface = stand_in.SURFACE
    assert surface["Linear.forward"][0] == "inp"
    assert "num_gemms" in surface["Linear.init_fp8_metadata"]
    assert {"quantization_state", "is_first_fp8_module"} <= set(surface["FP8GlobalStateManager"])
    assert {"is_first_fp8_module", "autocast_depth", "fp8_recipe"} <= set(surface["FP8GlobalState"])
    fp8_library.Library(stand_in.modules(), Fp8(), {"one": (16, 32)}, NAMES, CPU, drops_weights=True)


def scaled(recipe, with_library):
    """A layer, its scales, and what counts its casts; the layer is the second matrix of the model."""
    torch.manual_seed(0)
    layer = Fp8Linear(32, 48)
    torch.nn.init.normal_(layer.bias)
    scaling = Scaling(recipe, NAMES, CPU)
    layer.casts = scaling.of("two")
    if with_library:
        shapes = {"two": (32, 48)}
        scaling.library = Library(stand_in.modules(), recipe, shapes, NAMES, CPU, drops_weights=False)
    recorder = Recorder(CPU, None)
    recorder.microbatch = 0
    scaling.tally = Tally(NAMES, CPU, recorder, 0)
    return layer, scaling


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_lent_weights_give_torchs_products_gradients_scales_and_counts(recipe, is_recorded):
    from labkit.rank import fp8

    pairs = [scaled(RECIPES[recipe], with_library) for with_library in (False, True)]
    found = []
    for layer, scaling in pairs:
        rows = []
        if not is_recorded:
            scaling.tally = None
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            layer.zero_grad()
            x = torch.randn(2, 16, 32, generator=generator, requires_grad=True)
            with fp8.products(scaling), torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
                assert y.dtype == torch.bfloat16
                y.backward(torch.randn(2, 16, 48, generator=generator).bfloat16())
            rows += scaling.tally.take(None) if is_recorded else []
            scaling.end_step()
        found.append((y, x.grad, layer.weight.grad, scaling.scale, scaling.history, layer.bias.grad, rows))
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][:5], found[1][:5], strict=True):
        assert torch.equal(one, other)
    assert torch.allclose(found[0][5], found[1][5], rtol=0.02, atol=0.1)  # of the bias, added up in bf16
    assert found[0][6] == found[1][6]
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def trained(text, recipe, with_library, **options):
    from labkit.rank import report, state, training

    why, load, messages = fp8_library.why_not, fp8_library.load, []
    if with_library:
        fp8_library.why_not, fp8_library.load = lambda *_: "", stand_in.modules
    report.install(lambda topic, message: messages.append(message) if topic == "fp8" else None)
    try:
        plan = build(MODEL, Layout.parse(f"{text} fp8"))
        settings = Training(num_steps=2, optimizer="sgd", learning_rate=0.5, fp8=recipe, record_fp8=True, **options)
        result = training.train(plan, settings)
    finally:
        fp8_library.why_not, fp8_library.load = why, load
        report.install(None)
    return None if result is None else (result, state.current().scaling.state(), messages)


def all_layouts():
    found = {(text, used): trained(text, RECIPES["delayed"], used) for text in LAYOUTS for used in (False, True)}
    for name in ("current", "block"):
        found |= {(name, used): trained("tp2 m2", RECIPES[name], used) for used in (False, True)}
    trained("tp2 m2", RECIPES["delayed"], True)
    found["live", True] = trained("tp2 m2", RECIPES["delayed"], True, start="live")
    trained("tp2 m2", RECIPES["delayed"], False)
    found["live", False] = trained("tp2 m2", RECIPES["delayed"], False, start="live")
    return found


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_library_trains_every_kind_of_layout_as_torch_does():
    found = bare.run(all_layouts, 2)[0]
    for text in {key for key, _ in found}:
        (one, scales, rows), (other, other_scales, other_rows) = found[text, False], found[text, True]
        assert one["fp8_library"] == "torch: ranks compute on the CPU"
        assert other["fp8_library"] == "transformer_engine"
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-3), text
        assert other["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-2), text
        ratio = other_scales["scale"] / scales["scale"]
        assert 0.8 < ratio.min() <= ratio.max() < 1.25, text
        assert [len(message["rows"]) for message in other_rows] == [len(message["rows"]) for message in rows]
        assert all(None not in row for row in other_rows[-1]["rows"])
