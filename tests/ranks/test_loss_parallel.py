"""The loss over logits that stay split over the vocabulary: what a rank keeps, sends and gets."""

import functools
import math

import pytest

from labkit.plan import build
from labkit.spec import Layout, Model
from tests.ranks import bare

pytestmark = pytest.mark.ranks

MODEL = Model(num_layers=1, d_model=32, num_heads=4, vocab_size=512, seq_len=16)
SAMPLES = 3
PRECISIONS = ("fp32", "bf16")


def losses(tp, precision):
    """Runs in each rank: forward and backward of a whole model's last part, split over tp or not."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from labkit.rank import mesh, tensor_parallel
    from labkit.rank.model import mean_loss
    from labkit.rank.parameters import build_stage
    from labkit.rank.recorder import Recorder

    plan = build(MODEL, Layout(tp=tp, precision=precision, microbatch_size=SAMPLES))
    own, device = mesh.of(plan), torch.device("cpu")
    if own is None:
        return None
    recorder = Recorder(device, 0)
    stage = build_stage(plan, 0, 0, device)
    loss_of = mean_loss
    if tp > 1:
        tensor_parallel.shard(stage, own.device_mesh["tp"], recorder)
        loss_of = tensor_parallel.Loss(own.device_mesh["tp"], recorder)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(512, (SAMPLES, 16), generator=generator) for _ in range(2))
    logits = stage(tokens)
    sizes = []

    def weigh(tensor):
        local = getattr(tensor, "_local_tensor", tensor)
        sizes.append(local.numel() * local.element_size())
        return tensor

    recorder.open(on=True, pace=None)
    with tensor_parallel.loss_over_shards(tp):
        with saved_tensors_hooks(weigh, lambda tensor: tensor):
            loss = loss_of(logits, targets)
        rows = [(row[0], row[6], row[8]) for row in recorder.take()]
        (gradient,) = torch.autograd.grad(loss, logits)
        num_in_backward = len(recorder.take())
    recorder.close()
    return {
        "loss": loss.item(),
        "shape": tuple(logits.shape),
        "rows": rows,
        "backward": num_in_backward,
        "kept": sum(sizes),
        "gradient": gradient.float().numpy(),
    }


def after_an_error():
    """Runs in each rank: an error inside, then a softmax over what nobody split, which `loss_parallel` refuses."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    from labkit.rank.tensor_parallel import loss_over_shards

    mesh = init_device_mesh("cpu", (4,))
    whole = DTensor.from_local(torch.zeros(1, 3, 8), mesh, [Replicate()])
    try:
        with loss_over_shards(4):
            raise KeyError
    except KeyError:
        return torch.log_softmax(whole, -1).to_local().max().item()


def all_losses():
    """Runs in each rank."""
    found = {(tp, precision): losses(tp, precision) for tp in (1, 2, 4) for precision in PRECISIONS}
    return found | {"after an error": after_an_error()}


@functools.cache
def world():
    return bare.run(all_losses, 4)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_has_its_share_of_the_logits_and_the_whole_loss(tp, precision):
    one = world()[0][1, precision]
    band = 1e-6 if precision == "fp32" else 1e-3
    for rank in range(tp):
        found = world()[rank][tp, precision]
        assert found["shape"] == (SAMPLES, 16, 512 // tp)
        assert found["loss"] == pytest.approx(one["loss"], rel=band)
        part = one["gradient"][..., rank * 512 // tp : (rank + 1) * 512 // tp]
        assert abs(found["gradient"] - part).max() <= 10 * band * abs(part).max()


@pytest.mark.parametrize("tp", [2, 4])
def test_what_the_backward_of_the_loss_needs_falls_with_tp(tp):
    tokens, per_number = SAMPLES * 16, 4
    for rank in range(tp):
        found, one = world()[rank][tp, "fp32"]["kept"], world()[0][1, "fp32"]["kept"]
        assert found <= one / tp + 4 * tokens * per_number


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tp", [2, 4])
def test_the_forward_sends_three_numbers_a_token_and_the_backward_none(tp, precision):
    for rank in range(tp):
        found = world()[rank][tp, precision]
        assert found["rows"] == [("all_reduce", "tp", SAMPLES * 16 * 4)] * 3
        assert found["backward"] == 0


def test_an_error_leaves_nothing_switched_on():
    assert [found["after an error"] for found in world()] == pytest.approx([-math.log(8)] * 4)
