import dataclasses
import math
import pickle

import pytest

from labkit.errors import PlanError
from labkit.spec import DEVICES, Hardware, Model, Pace, Training

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}
SMALL = {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 256, "seq_len": 32}
HOSTILE = [None, True, 2.5, math.nan, math.inf, -1, 0, "2", [2], {}, b"2", 10**30, 10**5000, object()]


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_preset_has_the_published_number_of_parameters(name, count):
    assert Model.preset(name).num_parameters == count


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(PlanError, match=r"preset 'lama3-8b' is unknown: .*Did you mean 'llama3-8b'\?"):
        Model.preset("lama3-8b")
    for name in (None, 3, ["tiny"], ""):
        with pytest.raises(PlanError, match="is unknown"):
            Model.preset(name)


@pytest.mark.parametrize("field", [*SMALL, "num_kv_heads", "d_ff"])
@pytest.mark.parametrize(
    "value", HOSTILE, ids=lambda value: f"{type(value).__name__}-{str(value)[:8]}" if value != 10**5000 else "huge"
)
def test_model_refuses_what_is_no_size(field, value):
    if value is None and field in ("num_kv_heads", "d_ff"):
        assert isinstance(getattr(Model(**SMALL | {field: None}), field), int)
        return
    with pytest.raises(PlanError, match=field):
        Model(**SMALL | {field: value})


@pytest.mark.parametrize(
    "field", ["norm", "position", "activation", "bias", "tied_embeddings", "norm_eps", "rope_theta"]
)
@pytest.mark.parametrize("value", [None, 3 + 0j, math.nan, "rmss", [], object()])
def test_model_refuses_unknown_kinds(field, value):
    with pytest.raises(PlanError, match=field):
        Model(**SMALL | {field: value})


def test_heads_must_divide():
    with pytest.raises(PlanError, match=r"d_model=64 is not divisible by num_heads=6: .* Use d_model=66\."):
        Model(**SMALL | {"num_heads": 6})
    with pytest.raises(PlanError, match=r"num_heads=4 is not divisible by num_kv_heads=3: .* Use num_kv_heads=2\."):
        Model(**SMALL, num_kv_heads=3)
    with pytest.raises(PlanError, match=r"num_heads=4 is not divisible by num_kv_heads=8: .* Use num_kv_heads=4\."):
        Model(**SMALL, num_kv_heads=8)
    with pytest.raises(PlanError, match="heads of 3 entries, an odd number"):
        Model(**SMALL | {"d_model": 12})
    assert Model(**SMALL | {"d_model": 12}, position="learned").head_dim == 3


def test_defaults_of_the_feed_forward_width():
    assert Model(**SMALL, activation="gelu").d_ff == 256
    assert Model(**SMALL | {"d_model": 4096, "num_heads": 32}).d_ff == 11_008
    assert Model(**SMALL | {"d_model": 256}).d_ff == 704


def test_integers_of_other_libraries_count():
    numpy = pytest.importorskip("numpy")
    model = Model(**SMALL | {"num_layers": numpy.int64(3)})
    assert type(model.num_layers) is int
    with pytest.raises(PlanError, match="num_layers"):
        Model(**SMALL | {"num_layers": numpy.array([1, 2])})
    with pytest.raises(PlanError, match="num_layers"):
        Model(**SMALL | {"num_layers": numpy.float32(2)})


def test_values_are_frozen_hashable_and_pickle():
    for value in (Model(**SMALL), Training(num_steps=3), Pace(forward_s=1, backward_s=2), Hardware.preset("h100")):
        assert pickle.loads(pickle.dumps(value)) == value
        assert dataclasses.replace(value) == value
        assert len({value, dataclasses.replace(value)}) == 1
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 3)
    assert not hasattr(Model(**SMALL), "__dict__")


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "num_steps": [None, 0, -3, 2.0, math.nan, True, "3", 10**5000],
        "seed": [None, -1, 0.5, True, 2**63, "0"],
        "optimizer": [None, "adam", "AdamW", 3, ["sgd"]],
        "learning_rate": [None, -1.0, math.nan, math.inf, True, "1e-3", 10**400, 1j],
        "betas": [None, 0.9, (0.9,), (0.9, 1.0), (0.9, math.nan), (-0.1, 0.9), "ab", (None, 0.9), (0.9, 0.9, 0.9)],
        "weight_decay": [None, -0.1, math.nan, "0", False],
        "clip_norm": [0, -1.0, math.nan, math.inf, "1", True],
        "start": [None, "latest", "Fresh", 1],
        "data": ["", "  ", 3, b"path", "a\0b", True],
        "pace": [1.0, (0.1, 0.2), "slow", True],
        "trace": [None, 1, "yes"],
    }.items(),
)
def test_training_refuses_and_names_the_field(field, values):
    for value in values:
        with pytest.raises(PlanError, match=field):
            Training(**{"num_steps": 2} | {field: value})


def test_training_normalises(tmp_path):
    training = Training(num_steps=1, betas=[0, 0.5], learning_rate=1, clip_norm=None, data=tmp_path)
    assert training.betas == (0.0, 0.5)
    assert training.data == str(tmp_path)
    assert training.clip_norm is None
    assert type(training.learning_rate) is float


def test_an_unknown_optimizer_names_the_nearest():
    with pytest.raises(
        PlanError, match=r"optimizer='adam' is unknown: optimizer is 'adamw' or 'sgd'. Did you mean 'adamw'\?"
    ):
        Training(num_steps=1, optimizer="adam")


@pytest.mark.parametrize("value", [None, 0, -1, math.nan, math.inf, True, "1", 10**400, 4000])
def test_pace_refuses(value):
    with pytest.raises(PlanError, match=r"Pace\.backward_s"):
        Pace(forward_s=0.1, backward_s=value)


def test_a_pace_of_each_stage():
    pace = Pace(forward_s=[0.1, 0.2], backward_s=1)
    assert (pace.forward_s, pace.backward_s) == ((0.1, 0.2), 1.0)
    assert [pace.seconds(kind, 1) for kind in "FBIW"] == [0.2, 1.0, 0.5, 0.5]
    pace.check_stages(2)
    with pytest.raises(PlanError, match=r"Pace\.forward_s has 2 durations for 4 stages: give one for each stage"):
        pace.check_stages(4)
    for value in ([], [0.1, 0], (0.1, "1"), [[0.1]]):
        with pytest.raises(PlanError, match=r"Pace\.backward_s"):
            Pace(forward_s=0.1, backward_s=value)


def test_devices():
    assert all(Hardware.preset(name).peak_flops("bf16") > Hardware.preset(name).peak_flops("fp32") for name in DEVICES)
    assert Hardware.find("NVIDIA H100 80GB HBM3") == Hardware.preset("h100")
    assert Hardware.find("NVIDIA A100-SXM4-80GB") == Hardware.preset("a100")
    assert Hardware.find("NVIDIA H100 PCIe") is None
    assert Hardware.find("NVIDIA A100-SXM4-40GB") == Hardware.preset("a100-40")
    assert Hardware.find("NVIDIA GeForce RTX 4090") == Hardware.preset("rtx4090")
    assert Hardware.find("NVIDIA GeForce RTX 3060") is None
    with pytest.raises(PlanError, match="a100-80 has no fp8"):
        Hardware.preset("a100").peak_flops("fp8")
    with pytest.raises(PlanError, match=r"device 'h10' is unknown"):
        Hardware.preset("h10")


def test_flops_of_a_tied_model_leave_out_positions_only():
    model = Model.preset("gpt2-124m")
    attention = 12 * 12 * 768 * 1024
    assert model.flops_per_token == 6 * (124_439_808 - 1024 * 768) + attention


def test_a_value_with_a_broken_repr_is_still_refused():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no text")

    with pytest.raises(PlanError, match="num_layers=<Broken> is a Broken"):
        Model(**SMALL | {"num_layers": Broken()})
