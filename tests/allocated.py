"""Steps of layouts in one process, whose groups send nothing, with every allocation counted. Run as a program.

Prints for each layout of its arguments one line: what was allocated at most in a step, beside what stays from step to
step, and what `predict.memory` says of it.
"""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit import plan as planning
from labkit import predict
from labkit.rank import data_parallel, tensor_parallel
from labkit.rank.model import mean_loss
from labkit.rank.parameters import build_stage
from labkit.rank.recorder import Recorder
from labkit.spec import Layout, Model

WORLD = 4
CPU = torch.device("cpu")


def summed(_state, bucket):
    """A sum that is there at once: groups of this kind answer with nothing."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def step_of(plan):
    """A function that runs one step of forwards and backwards on rank 0, and forgets the gradients."""
    layout, model, recorder = plan.layout, plan.model, Recorder(CPU, 0)
    mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    net = build_stage(plan, 0, 0, CPU)
    if layout.tp > 1:
        tensor_parallel.shard(net, mesh["tp"], recorder, sequence=layout.sequence_parallel)
    wrapped = net
    if layout.dp > 1 and layout.zero_stage >= 2:
        wrapped = data_parallel.shard(
            net, mesh["dp"], reshard=layout.reshards, has_shards=layout.tp > 1, recorder=recorder
        )
    elif layout.dp > 1:
        wrapped = data_parallel.wrap(net, mesh["dp"], has_shards=layout.tp > 1, recorder=recorder)
    run = data_parallel.Accumulation(
        wrapped,
        tensor_parallel.Loss(mesh["tp"], recorder) if layout.tp > 1 else mean_loss,
        layout.num_microbatches,
        1.0 / (layout.num_microbatches * layout.dp),
        recorder,
        keeps_gathered=not layout.reshards,
    )
    samples = torch.zeros(layout.num_microbatches * layout.microbatch_size, model.seq_len, dtype=torch.int64)

    def step():
        with tensor_parallel.loss_over_shards(layout.tp):
            run(samples, samples)
        for parameter in net.parameters():
            parameter.grad = None

    return step


def most_allocated(step):
    """Bytes that a step has at most beyond those before it."""
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [one for one in found.profiler.kineto_results.events() if one.name() == "[memory]"]
    held = most = 0
    for one in sorted(events, key=lambda one: one.start_ns()):
        held += one.nbytes()
        most = max(most, held)
    return most


def predicted(plan):
    """The peak without what is there before a step: weights, optimizer states, samples, buckets that stay."""
    one = predict.memory(plan)[0]
    layout = plan.layout
    shards = 4 * plan.holding(0).optimizer if layout.zero_stage >= 2 else one.parameters
    stays = sum(one.buffers_by_kind.get(kind, 0) for kind in ("samples", "positions", "buckets"))
    if layout.dp > 1 and layout.tp == 1 and layout.zero_stage < 2 and layout.num_microbatches == 1:
        stays += one.gradients
    return one.peak, one.peak - shards - one.optimizer - stays


def main():
    """Print what is allocated and what is predicted."""
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    data_parallel._add_up = summed
    for text in sys.argv[1:]:
        plan = planning.build(Model.preset("tiny"), Layout.parse(text))
        peak, beyond = predicted(plan)
        measured = most_allocated(step_of(plan))
        print(json.dumps({"layout": text, "peak": peak, "predicted": beyond, "allocated": measured}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
