"""Training on the ranks: the loop, one step, and what they report."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.errors import LabError, ranks_text
from labkit.plan import Plan
from labkit.rank import data, data_parallel, groups, mesh, optimizer, report, state, tensor_parallel
from labkit.rank.mesh import Mesh
from labkit.rank.model import Transformer, mean_loss
from labkit.rank.parameters import Weights, build_stage
from labkit.rank.pipeline_parallel import Pipeline, Stage, has_loop
from labkit.rank.recorder import Recorder
from labkit.rank.state import State
from labkit.spec import Layout, Training


def train(plan: Plan, training: Training) -> dict[str, Any] | None:
    """Train, and keep the state for a run with `start='live'`.

    The same seed and global batch give the same losses and gradient norms under every layout. A step ends early, after
    its update, on all ranks at once if any rank was asked to stop.

    Runs on: every rank of the world at once. Communicates: what the layout does, and one small all-reduce a step that
    carries loss, norm and the wish to stop.

    Returns:
        On the layout's ranks, equal on all but for `step_s`: "losses" (nats per token, mean over the global batch),
        "grad_norms" (global, before clipping), "step_s" (seconds of each step on this rank), "tokens_per_step",
        "stopped" and "device" (its name). None on ranks that the layout does without.

    Raises:
        PlanError: the layout takes more ranks than there are, the data is unusable, or there is no such live state.
        LabError: loss or gradient norm is not finite.
    """
    report.clear_stop()
    own = mesh.of(plan)
    if own is None:
        state.end("the last plan did without this rank")
        return None
    text = data.load(training.data, plan.model)
    if training.start == "fresh":
        state.end("a run that was to start fresh did not begin")
    if training.start == "live":
        live = state.resume(plan, training)
    else:
        gc.collect()  # wrapped modules of an earlier state are cyclic
        live = build(plan, training, own)
    state.keep(live)
    optimizer.adjust(live.optimizer, training)
    live.recorder.open(on=training.trace, pace=training.pace)
    try:
        result = _run(live, training, text)
    except BaseException as error:
        state.end(f"step {live.step} of the last run ended with {type(error).__name__}")
        raise
    live.recorder.close()
    return result


def build(plan: Plan, training: Training, own: Mesh, *, initialised: bool = True) -> State:
    """Make a fresh state: this rank's stages with their initial weights, wrapped as the layout says, and an optimizer.

    Runs on: the layout's ranks at once.

    Args:
        plan: the plan.
        training: gives the seed and the optimizer.
        own: this rank's place and groups.
        initialised: False leaves the weights as memory is, for one who fills them.
    """
    layout, device = plan.layout, groups.device()
    indices = plan.stages(own.rank)
    recorder = Recorder(device, indices[0] if len(indices) == 1 else None)
    seed = training.seed if initialised else None
    stages = [build_stage(plan, index, seed, device) for index in indices]
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
    return State(
        plan=plan,
        optimizer_kind=training.optimizer,
        weights=weights,
        optimizer=_optimizer(training, layout, weights, recorder),
        forward_backward=forward_backward,
        recorder=recorder,
        step=0,
    )


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


def gather_weights(live: State | None = None) -> dict[str, Tensor]:
    """Return every parameter of the live state, whole, by its name in the whole model.

    Runs on: the layout's ranks at once. Communicates: all-gathers over tp, broadcasts over pp.

    Raises:
        PlanError: no live state.
    """
    return (live or state.current()).weights.gather()


def _run(live: State, training: Training, text: Tensor) -> dict[str, Any]:
    losses: list[float] = []
    norms: list[float] = []
    seconds: list[float] = []
    stopped = False
    for _ in range(training.num_steps):
        start_s = time.monotonic()
        loss, norm, stopped = step(live, training, text)
        seconds.append(time.monotonic() - start_s)
        losses.append(loss)
        norms.append(norm)
        _report(live, loss, norm, seconds[-1])
        live.step += 1
        if stopped:
            break
    return {
        "losses": losses,
        "grad_norms": norms,
        "step_s": seconds,
        "tokens_per_step": live.plan.tokens_per_step,
        "stopped": stopped,
        "device": groups.device_name(),
    }


def _report(live: State, loss: float, norm: float, step_s: float) -> None:
    if live.weights.mesh.rank == 0:
        report.emit("step", {"step": live.step, "loss": loss, "grad_norm": norm, "step_s": step_s})
    if live.recorder.on:
        report.emit("events", {"events": live.recorder.take()})


def step(live: State, training: Training, text: Tensor) -> tuple[float, float, bool]:
    """One optimizer step.

    Runs on: the layout's ranks at once.

    Returns:
        Global mean loss, global gradient norm, and whether any rank was asked to stop.

    Raises:
        LabError: loss or norm is not finite; weights are then still those before the step.
    """
    plan, weights, recorder = live.plan, live.weights, live.recorder
    recorder.begin_step(live.step)
    start = recorder.mark()
    tokens, targets = data.batch(
        text, plan.model, plan.layout, seed=training.seed, step=live.step, dp_rank=weights.mesh.place.dp_rank
    )
    device = groups.device()
    with tensor_parallel.loss_over_shards(plan.layout.tp):
        share = live.forward_backward(tokens.to(device), targets.to(device))
    gradients = weights.collect_gradients()
    loss, squared_norm, num_stops = _agree(live, share, weights.squared_norm(gradients))
    norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
    if not (math.isfinite(loss) and math.isfinite(norm)):
        _refuse(live, training, loss, norm, share)
    update = recorder.mark()
    optimizer.clip(gradients.values(), norm, training.clip_norm)
    live.optimizer.step()
    weights.clear_gradients()
    recorder.add("optimizer", update)
    recorder.memory()
    recorder.add("step", start)
    return loss, norm, num_stops > 0


def _agree(live: State, share: Tensor, squared_norm: Tensor) -> tuple[float, float, float]:
    """Add up loss, squared norm and wishes to stop over the layout's ranks: the step's one small all-reduce."""
    own = live.weights.mesh
    if own.place.tp_rank > 0:
        share = torch.zeros_like(share)  # every tp rank has the whole loss
    stop = torch.tensor(float(report.stop_requested()), device=share.device)
    sums = torch.stack([share.double(), squared_norm.double(), stop.double()])
    if own.members is not None:
        start = live.recorder.mark()
        dist.all_reduce(sums, group=own.members)
        live.recorder.add("all_reduce", start, group="world", num_bytes=sums.numel() * sums.element_size())
    loss, squared, num_stops = sums.tolist()
    return loss, squared, num_stops


def _refuse(live: State, training: Training, loss: float, norm: float, share: Tensor) -> None:
    """Raise an error that names the ranks where the loss went wrong. Communicates: one all-gather."""
    own = live.weights.mesh
    is_bad = torch.tensor([0.0 if math.isfinite(share.item()) else 1.0], device=share.device)
    everywhere = [is_bad]
    if own.members is not None:
        everywhere = [torch.empty_like(is_bad) for _ in range(live.plan.world_size)]
        dist.all_gather(everywhere, is_bad, group=own.members)
    bad = [rank for rank, flag in enumerate(everywhere) if flag.item()]
    where = f" on {ranks_text(bad)}" if bad else ""
    what = f"loss is {loss:g}" if bad else f"gradient norm is {norm:g}"
    fix = "a lower learning_rate" + (" or clip_norm=1.0" if training.clip_norm is None else "")
    raise LabError(
        f"{what} at step {live.step}{where}: numbers left the range of {live.plan.layout.precision} with "
        f"learning_rate={training.learning_rate:g}. Use {fix}."
    )
