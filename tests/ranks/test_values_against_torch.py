"""What the values say, against torch itself: parameters built, schedules accepted. Starts no rank."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules

from labkit.rank.model import Transformer
from labkit.schedule import V_SHAPED, add_communication, build, format_actions, gpipe, one_f_one_b
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


TORCH = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipe_v": schedules.ScheduleDualPipeV,
}
SEVERAL = [
    (name, num_ranks, num_ranks * rounds, v)
    for name in TORCH
    for num_ranks in (1, 2, 3, 4, 8)
    for rounds in (2, 3, 5)
    for v in ((2,) if name in V_SHAPED else (2, 3))
]


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches", "v"), [*SEVERAL, ("zbv", 4, 3, 2), ("zbv", 2, 1, 2)])
def test_schedules_of_several_stages_are_torch_s_own(name, num_ranks, num_microbatches, v):
    """Where torch pairs a forward with a backward (DualPipeV), the pair is taken as one after the other."""
    sizes = {"num_stages": num_ranks * v, "group_size": num_ranks, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(stage_index=index, is_first=False, is_last=False, **sizes) for index in range(v)]
    theirs = TORCH[name](stages, num_microbatches).pipeline_order
    flat = [
        " ".join(str(part) for action in theirs[rank] if action is not None for part in action.sub_actions or (action,))
        for rank in range(num_ranks)
    ]
    assert format_actions(build(name, num_ranks, num_microbatches, v)).splitlines() == flat
