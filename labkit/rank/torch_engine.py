"""Builds a layout's training state on torch: DDP, `replicate`, `fully_shard`, tensor parallelism and pipelines."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.plan import Plan
from labkit.rank import data_parallel, fp8, groups, optimizer, tensor_parallel
from labkit.rank.mesh import Mesh
from labkit.rank.model import Transformer, mean_loss
from labkit.rank.parameters import Weights, build_stage
from labkit.rank.pipeline_parallel import Pipeline, Stage, has_loop
from labkit.rank.recorder import Recorder
from labkit.rank.state import State
from labkit.spec import Layout, Training


def build(plan: Plan, training: Training, own: Mesh, *, initialised: bool) -> State:
    """Make a fresh state: this rank's stages with their initial weights, wrapped as the layout says, and an optimizer.

    Runs on: the layout's ranks at once.
    """
    layout, device = plan.layout, groups.device()
    indices = plan.stages(own.rank)
    recorder = Recorder(device, indices[0] if len(indices) == 1 else None)
    seed = training.seed if initialised else None
    stages = [build_stage(plan, index, seed, device) for index in indices]
    scaling = fp8.attach(stages, plan, training, own, recorder)
    split: dict[str, int] = {}
    for stage in stages if layout.tp > 1 else ():
        split |= tensor_parallel.shard(stage, own.device_mesh["tp"], recorder, sequence=layout.sequence_parallel)
    nets = [_over_dp(stage, plan, own, recorder) for stage in stages]
    weights = Weights(stages, plan, own, split)
    loss = tensor_parallel.Loss(own.device_mesh["tp"], recorder) if layout.tp > 1 else mean_loss
    loss_scale = 1.0 / (layout.num_microbatches * layout.dp)
    forward_backward: Pipeline | data_parallel.Accumulation
    if layout.pp > 1:
        forward_backward = _pipeline(nets, plan, own, recorder, loss, loss_scale)
    else:
        forward_backward = data_parallel.Accumulation(
            nets[0], loss, layout.num_microbatches, loss_scale, recorder, keeps_gathered=not layout.reshards
        )
    made = _optimizer(training, layout, weights, recorder)
    return State(
        plan=plan,
        optimizer_kind=training.optimizer,
        weights=weights,
        optimizer=made,
        forward_backward=forward_backward,
        update=Update(weights, made, recorder),
        recorder=recorder,
        scaling=scaling,
        step=0,
    )


class Update:
    """Clips by the global norm and updates: what comes after the backward, on plain local tensors."""

    def __init__(self, weights: Weights, made: torch.optim.Optimizer | optimizer.Sharded, recorder: Recorder) -> None:
        self._weights, self._optimizer, self._recorder = weights, made, recorder
        self._gradients: dict[str, Tensor] = {}

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared global norm. Communicates: as `Weights.collect_gradients`."""
        self._gradients = self._weights.collect_gradients()
        return self._weights.squared_norm(self._gradients)

    def apply(self, norm: float, clip_norm: float | None) -> float:
        """Update the weights, and return the norm."""
        start = self._recorder.mark()
        optimizer.clip(self._gradients.values(), norm, clip_norm)
        self._optimizer.step()
        self._weights.clear_gradients()
        self._gradients = {}
        self._recorder.add("optimizer", start)
        return norm

    def close(self) -> None:
        """Nothing is held open."""


def _over_dp(stage: Transformer, plan: Plan, own: Mesh, recorder: Recorder) -> torch.nn.Module:
    layout = plan.layout
    if layout.dp == 1:
        return stage
    has_shards = layout.tp > 1
    if layout.zero_stage >= 2:
        return data_parallel.shard(stage, own.shards, reshard=layout.reshards, has_shards=has_shards, recorder=recorder)
    if _adds_up_at_the_end(plan):
        return stage
    return data_parallel.wrap(stage, own.device_mesh["dp"], has_shards=has_shards, recorder=recorder)


def _adds_up_at_the_end(plan: Plan) -> bool:
    """Whether gradients are added up over dp when the schedule says that they are complete, and not by a wrapper."""
    layout = plan.layout
    return layout.pp > 1 and layout.dp > 1 and layout.zero_stage < 2 and not has_loop(plan)


def _pipeline(
    nets: Sequence[torch.nn.Module],
    plan: Plan,
    own: Mesh,
    recorder: Recorder,
    loss: Callable[[Tensor, Tensor], Tensor],
    loss_scale: float,
) -> Pipeline:
    adds_up = _adds_up_at_the_end(plan)
    piped = []
    for net, index in zip(nets, plan.stages(own.rank), strict=True):
        gradient_sum = data_parallel.GradientSum(net, own.group("dp"), recorder, index) if adds_up else None
        stage = Stage(
            net,
            plan,
            index,
            device=groups.device(),
            group=own.group("pp"),
            recorder=recorder,
            gradient_sum=gradient_sum,
        )
        piped.append(stage)
    return Pipeline(piped, plan, loss, loss_scale)


def _optimizer(
    training: Training, layout: Layout, weights: Weights, recorder: Recorder
) -> torch.optim.Optimizer | optimizer.Sharded:
    tensors = weights.tensors.values()
    if layout.zero_stage == 1 and layout.dp > 1:
        return optimizer.Sharded(training, tensors, weights.mesh.group("dp"), recorder)
    return optimizer.make(training, tensors)
