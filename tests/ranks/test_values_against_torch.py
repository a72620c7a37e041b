"""What the values say, against torch itself: parameters built, schedules accepted. Starts no rank."""

import pytest
import torch
from torch.distributed.pipelining import schedules

from labkit.rank.model import Transformer
from labkit.schedule import add_communication, gpipe, one_f_one_b
from labkit.spec import PRESETS, Model

SIZES = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 3), (4, 2), (4, 4), (4, 9), (8, 3), (8, 16)]


def num_built(model):
    with torch.device("meta"):
        built = Transformer(model)
    return sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_preset_builds_with_that_many_parameters(name):
    model = Model.preset(name)
    assert num_built(model) == model.num_parameters


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied_embeddings", [False, True])
def test_every_kind_of_model_counts_what_torch_builds(norm, position, activation, bias, tied_embeddings):
    sizes = {"num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256, "seq_len": 32}
    kind = {"norm": norm, "position": position, "activation": activation, "bias": bias}
    model = Model(**sizes, **kind, tied_embeddings=tied_embeddings)
    assert num_built(model) == model.num_parameters


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_torch_accepts_schedules_and_adds_the_same_communication(builder, num_stages, num_microbatches):
    actions = builder(num_stages, num_microbatches)
    theirs = {rank: [schedules._Action.from_str(str(each)) for each in line] for rank, line in enumerate(actions)}
    schedules._validate_schedule(theirs, num_stages, num_stages, num_microbatches)
    lowered = schedules._add_send_recv(theirs, lambda stage: stage, num_stages)
    for rank, line in enumerate(add_communication(actions)):
        assert sorted(map(str, line)) == sorted(map(str, lowered[rank]))
