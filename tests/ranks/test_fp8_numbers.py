"""FP8 casts, scales and products against Transformer Engine's formulas and torch in high precision, in this process."""

import importlib.util
import json
import pathlib

import pytest
import torch

from labkit.rank import fp8_casting
from labkit.rank.fp8_linear import Fp8Linear
from labkit.rank.fp8_scaling import Scaling
from labkit.spec import Fp8
from tests import transformer_engine_library as library

GOLDEN = json.loads((pathlib.Path(library.__file__).parent / "golden" / "transformer_engine.json").read_text())
CPU = torch.device("cpu")
RECIPES = ("delayed", "current", "block")


def test_what_is_kept_of_transformer_engine_is_what_the_installed_one_says():
    found = importlib.util.find_spec("transformer_engine")
    if found is None:
        pytest.skip("no transformer_engine here (pip install labkit[gpu])")
    assert library.reference(pathlib.Path(found.origin).parent) == GOLDEN


@pytest.mark.parametrize("case", range(len(library.DELAYED)))
def test_delayed_scales_are_transformer_engines(case, monkeypatch):
    monkeypatch.setattr(Scaling, "_check_finite", lambda self: None)  # it goes on where the lab refuses an infinity
    length, choice, margin, largest = library.DELAYED[case]
    recipe = Fp8(history=length, amax=choice, margin=margin)
    role = "input" if largest == 448 else "gradient"
    scaling = Scaling(recipe, ("one",), CPU)
    column = ("input", "weight", "gradient").index(role)
    found = []
    for amax in library.STEPS:
        scaling.amax[column] = amax
        scaling.end_step()
        found.append(scaling.scale[column].item())
    # Its Python form rounds a quotient twice, which its kernel does not: one unit in the last place.
    assert found == pytest.approx([float.fromhex(value) for value in GOLDEN["delayed"][case]], rel=2**-23)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_current_and_block_scales_are_transformer_engines(name):
    amax = torch.tensor(library.AMAXES)
    scale = fp8_casting.current_scale(amax, {"e4m3": 448.0, "e5m2": 57344.0}[name])
    assert [value.hex() for value in scale.tolist()] == GOLDEN["scales"][f"{name}, any"]
    powers = [value.hex() for value in fp8_casting.power_of_two(scale).tolist()]
    assert powers == GOLDEN["scales"][f"{name}, powers of two"]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_a_cast_rounds_to_the_nearest_and_cuts_off_at_the_top(name):
    codes = torch.arange(256, dtype=torch.uint8).view(fp8_casting.DTYPES[name]).float()
    known = codes[torch.isfinite(codes)].unique()
    x = torch.cat([torch.randn(2000) * 10 ** torch.linspace(-6, 6, 2000), torch.tensor([1e30, -1e30, 0.0])])
    found = fp8_casting.round_to(x, name).float()
    nearest = (x[:, None].clamp(known.min(), known.max()) - known).abs().amin(dim=1)
    assert torch.equal((found - x.clamp(known.min(), known.max())).abs(), nearest)
    assert torch.isnan(fp8_casting.round_to(torch.tensor([float("nan")]), name).float()).all()


@pytest.mark.parametrize(("rows", "inner", "columns"), [(64, 96, 48), (16, 256, 144), (32, 272, 160)])
def test_products_are_those_of_the_numbers_that_the_fp8_values_stand_for(rows, inner, columns):
    torch.manual_seed(0)
    x, w = torch.randn(rows, inner), torch.randn(columns, inner) * 0.02
    w[3, 5] = 30.0

    def one_scale(tensor):
        return fp8_casting.cast(tensor, "e4m3", fp8_casting.current_scale(tensor.abs().amax(), 448.0))

    for left, right in ((one_scale(x), one_scale(w)), (fp8_casting.cast_rows(x, "e4m3"), squares(w))):
        exact = left.dequantised().double() @ right.dequantised().double().t()
        found = fp8_casting.product(left, right, torch.float32)
        assert (found - exact).norm() <= 1e-6 * exact.norm()


def squares(w):
    whole, transposed = fp8_casting.cast_squares(w, "e4m3")
    assert torch.equal(transposed.dequantised().t(), whole.dequantised())
    return whole


def test_blocks_keep_small_numbers_beside_an_outlier_that_one_scale_loses():
    x = torch.full((16, 256), 1e-4)
    x[:, 200] = 1000.0
    whole = fp8_casting.cast(x, "e4m3", fp8_casting.current_scale(x.abs().amax(), 448.0)).dequantised()
    blocks = fp8_casting.cast_rows(x, "e4m3").dequantised()
    assert torch.count_nonzero(whole[:, :128]) == 0
    assert torch.allclose(blocks[:, :128], x[:, :128], rtol=1 / 16)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_linear_layers_products_are_within_fp8s_rounding(recipe, autocast):
    torch.manual_seed(0)
    layer, twin = Fp8Linear(96, 160), torch.nn.Linear(96, 160)
    twin.load_state_dict(layer.state_dict())
    scaling = Scaling(Fp8(recipe=recipe), ("one",), CPU)
    layer.casts = scaling.of("one")
    x = torch.randn(4, 16, 96, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    gradient = torch.randn(4, 16, 160) * 1e-4  # below E5M2's smallest number, were there no scale
    for _ in range(2):  # delayed scaling knows the scales from the second step on
        for tensor in (x, other, layer.weight, layer.bias, twin.weight, twin.bias):
            tensor.grad = None
        with torch.autocast("cpu", enabled=autocast):
            y = layer(x)
        assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
        y.backward(gradient.to(y.dtype))
        wanted = twin(other)
        wanted.backward(gradient)
        scaling.end_step()
    pairs = ((y, wanted), (x.grad, other.grad), (layer.weight.grad, twin.weight.grad))
    for found, exact in pairs:
        assert (found - exact).norm() < 0.08 * exact.norm()  # E5M2's last bit is an eighth, E4M3's a sixteenth
        assert (found - exact).norm() > 0.01 * exact.norm()  # they are FP8
    assert layer.weight.grad.dtype == torch.float32
    assert torch.allclose(layer.bias.grad, twin.bias.grad, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_half_a_backward_computes_half_and_the_halves_are_the_whole(recipe, monkeypatch):
    torch.manual_seed(0)
    layer = Fp8Linear(32, 48)
    layer.casts = Scaling(Fp8(recipe=recipe), ("one",), CPU).of("one")
    x = torch.randn(16, 32, requires_grad=True)
    y, gradient = layer(x * 1.0), torch.randn(16, 48)
    num_products = []
    product = fp8_casting.product

    def counted(*arguments):
        num_products[-1] += 1
        return product(*arguments)

    monkeypatch.setattr(fp8_casting, "product", counted)
    num_products.append(0)
    (of_input,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
    num_products.append(0)
    of_weight = torch.autograd.grad(y, (layer.weight, layer.bias), gradient, retain_graph=True)
    num_products.append(0)
    y.backward(gradient)
    assert num_products == [1, 1, 2]
    assert torch.equal(of_input, x.grad)
    assert torch.equal(of_weight[0], layer.weight.grad)
    assert torch.equal(of_weight[1], layer.bias.grad)


def test_delayed_scaling_clips_an_outlier_and_current_does_not():
    outlier = torch.randn(16, 32)
    outlier[0, 0] = 100.0
    largest = {}
    for recipe in ("delayed", "current"):
        layer = Fp8Linear(32, 32, bias=False)
        scaling = Scaling(Fp8(recipe=recipe), ("one",), CPU)
        layer.casts = scaling.of("one")
        layer(torch.randn(16, 32).clamp(-2, 2))
        scaling.end_step()
        largest[recipe] = layer.casts.along("input", outlier).dequantised().max().item()
    assert largest["delayed"] <= 2.0
    assert largest["current"] == pytest.approx(100.0)


def test_what_is_not_finite_stays_so():
    for recipe in RECIPES:
        layer = Fp8Linear(16, 16)
        layer.casts = Scaling(Fp8(recipe=recipe), ("one",), CPU).of("one")
        x = torch.ones(16, 16)
        x[3, 3] = float("nan")
        assert not torch.isfinite(layer(x)).all()


def test_the_state_of_scales_goes_over_to_another():
    first, second = (Scaling(Fp8(history=4), ("one", "two"), CPU) for _ in range(2))
    for amax in (3.0, 7.0):
        first.amax[:] = amax
        first.end_step()
    second.load(first.state())
    first.end_step()
    second.end_step()
    assert torch.equal(first.scale, second.scale)
    assert torch.equal(first.history, second.history)
    with pytest.raises(Exception, match="another model or recipe"):
        Scaling(Fp8(history=8), ("one", "two"), CPU).load(first.state())
