"""Builds a layout's training state on DeepSpeed: ZeRO stages 0 to 3 over dp, optimizer and parameters in host memory.

The same model, samples, optimizer and numerics as torch's engine (see `precision`): DeepSpeed gets an fp32 model whose
forward runs under autocast, so losses compare. What DeepSpeed decides by size is set so that a stage does what its name
says in small models too: gradients are added up layer by layer from stage 2 on, and stage 3 shards every parameter and
gathers it layer by layer, for the forward and again for the backward.
"""

import importlib
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from labkit.plan import Plan
from labkit.plan.parameters import canonical
from labkit.rank import data_parallel, deepspeed_library, deepspeed_pipeline, fp8, groups, optimizer, parameters
from labkit.rank.mesh import Mesh
from labkit.rank.model import Layer, mean_loss
from labkit.rank.parameters import build_stage
from labkit.rank.recorder import Recorder
from labkit.rank.state import State
from labkit.spec import Layout, Training

# Elements, not bytes: DeepSpeed's default, which allocates 2 GB in fp32, whatever the model's size.
_MOST_BUCKET = 500_000_000
_NEVER = 1 << 40


def build(plan: Plan, training: Training, own: Mesh, *, initialised: bool) -> State:
    """Make a fresh state.

    Runs on: the layout's ranks at once. Communicates: what DeepSpeed's start does.

    Raises:
        LabError: DeepSpeed or its compiled operations are not there.
    """
    layout, device = plan.layout, groups.device()
    deepspeed = deepspeed_library.load()
    if _updates_in_host_memory(layout, training):
        deepspeed_library.check_operation("cpu_adam", "AdamW in host memory")
    stage = own.place.pp_rank
    recorder = Recorder(device, stage)
    backend = enter_world(own, recorder)
    net = build_stage(plan, stage, training.seed if initialised else None, device)
    scaling = fp8.attach([net], plan, training, own, recorder)
    if layout.zero_stage == 3:
        deepspeed.utils.set_z3_leaf_modules(net, [Layer])  # gathered whole, not matrix by matrix
    with deepspeed_library.quiet():
        engine, *_ = deepspeed.initialize(
            model=deepspeed_pipeline.module(net, plan) if layout.pp > 1 else net,
            optimizer=_optimizer(deepspeed, net, layout, training),
            config=configuration(plan, training),
            dist_init_required=False,
        )
    return State(
        plan=plan,
        optimizer_kind=training.optimizer,
        weights=Weights(deepspeed, engine, net, plan, own),
        optimizer=engine.optimizer,
        forward_backward=(
            deepspeed_pipeline.Pipeline(engine, plan, own, recorder)
            if layout.pp > 1
            else Accumulation(engine, plan, recorder)
        ),
        update=Update(engine, plan, backend, recorder),
        recorder=recorder,
        scaling=scaling,
        step=0,
    )


def configuration(plan: Plan, training: Training) -> dict[str, Any]:
    """What DeepSpeed is told about a plan."""
    layout, model = plan.layout, plan.model
    is_cuda = groups.device().type == "cuda"
    largest = max(model.num_layer_parameters, model.vocab_size * model.d_model)
    bucket = min(_MOST_BUCKET, model.num_parameters if layout.zero_stage < 2 else largest)
    zero: dict[str, Any] = {
        "stage": layout.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": min(_MOST_BUCKET, model.num_parameters),
        # On a CPU nothing overlaps, and a small model would be gathered whole ahead of its use.
        "stage3_prefetch_bucket_size": model.num_layer_parameters if is_cuda else 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "memory_efficient_linear": False,  # it replaces torch's linear in the whole process
    }
    in_host_memory = {"device": "cpu", "pin_memory": is_cuda}
    if layout.offload != "none":
        zero["offload_optimizer"] = in_host_memory
    if layout.offload == "all":
        zero["offload_param"] = in_host_memory
    return {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.microbatch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": (training.clip_norm or 0.0) if layout.zero_stage else 0.0,
        "steps_per_print": _NEVER,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def enter_world(own: Mesh, recorder: Recorder) -> object:
    """Make the layout's ranks DeepSpeed's world, for it knows one at a time; returns its way to them."""
    backend: object = importlib.import_module("labkit.rank.deepspeed_backend").RecordedBackend(own, recorder)
    deepspeed_library.enter_world(backend)
    return backend


def _updates_in_host_memory(layout: Layout, training: Training) -> bool:
    return layout.offload != "none" and training.optimizer == "adamw"


def _optimizer(
    deepspeed: ModuleType, module: torch.nn.Module, layout: Layout, training: Training
) -> torch.optim.Optimizer:
    if not _updates_in_host_memory(layout, training):
        return optimizer.make(training, module.parameters())
    with deepspeed_library.processor_unasked():
        made: torch.optim.Optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
            list(module.parameters()),
            lr=training.learning_rate,
            betas=training.betas,
            weight_decay=training.weight_decay,
            adamw_mode=True,
        )
    return made


class Accumulation(data_parallel.Accumulation):
    """Forward and backward of every micro-batch through DeepSpeed's engine, which adds up gradients over dp."""

    def __init__(self, engine: Any, plan: Plan, recorder: Recorder) -> None:
        layout = plan.layout
        share = 1.0 / (layout.num_microbatches * layout.dp)
        super().__init__(engine, mean_loss, layout.num_microbatches, share, recorder)
        self._engine = engine

    def _microbatch(self, index: int, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        recorder = self._recorder
        start = recorder.begin(index)
        loss = mean_loss(self._engine(tokens_BS), targets_BS)
        recorder.end("F", start)
        start = recorder.begin(index)
        self._engine.set_gradient_accumulation_boundary(index == self._num_microbatches - 1)
        self._engine.backward(loss)
        recorder.end("B", start)
        return loss.detach() * self._loss_scale


class Update:
    """Clips and updates through DeepSpeed's engine.

    Under ZeRO it finds the norm itself. At stage 0 in fp32 it tells none, so norm and clipping are done here.
    """

    def __init__(self, engine: Any, plan: Plan, backend: object, recorder: Recorder) -> None:
        self._engine, self._plan, self._backend, self._recorder = engine, plan, backend, recorder

    def squared_norm(self) -> Tensor:
        """This rank's share at stage 0; 0 under ZeRO, where the norm comes with the update."""
        layout = self._plan.layout
        if layout.zero_stage:
            return torch.zeros((), device=groups.device())
        return torch.stack(torch._foreach_norm(self._gradients())).square().sum() / layout.dp

    def _gradients(self) -> list[Tensor]:
        return [one.grad for one in self._engine.module.parameters() if one.grad is not None]

    def apply(self, norm: float, clip_norm: float | None) -> float:
        """Update the weights and return the norm. Communicates: as the stage says."""
        start = self._recorder.mark()
        engine, layout = self._engine, self._plan.layout
        if layout.zero_stage:
            engine.optimizer.clip_grad = clip_norm or 0.0
        else:
            optimizer.clip(self._gradients(), norm, clip_norm)
        if layout.pp > 1:
            engine._exec_optimizer_step()
        else:
            engine.step()
        if layout.zero_stage:
            found = engine.get_global_grad_norm()
            norm = math.nan if found is None else float(found)
        self._recorder.add("optimizer", start)
        return norm

    def close(self) -> None:
        """Remove DeepSpeed's hooks and what it remembers of the module; its groups may be gone already."""
        with deepspeed_library.quiet(), deepspeed_library.through(self._backend):
            self._engine.destroy()
        deepspeed_library.forget_module(self._engine.module)


class Weights:
    """The weights that DeepSpeed holds.

    Attributes:
        mesh: this rank's groups.
        engine: DeepSpeed's engine.
        parameters: canonical name -> this rank's parameter, as DeepSpeed keeps it.
    """

    def __init__(self, deepspeed: ModuleType, engine: Any, stage: torch.nn.Module, plan: Plan, mesh: Mesh) -> None:
        self.mesh, self.engine = mesh, engine
        self.parameters = {canonical(name, plan.model): parameter for name, parameter in stage.named_parameters()}
        self._deepspeed = deepspeed
        self._over_stages = parameters.Weights([stage], plan, mesh, {}) if plan.layout.pp > 1 else None

    def gather(self) -> dict[str, Tensor]:
        """Return every parameter of the whole model, whole, on every member rank.

        Runs on: all member ranks at once. Communicates: all-gathers over dp at stage 3, broadcasts over pp.
        """
        if self._over_stages is not None:
            return self._over_stages.gather()
        whole = {}
        for name, parameter in self.parameters.items():
            with self._deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                whole[name] = parameter.detach().clone()
        return whole
