"""Pipeline parallelism by torch's pipelining.

GPipe (Huang et al. 2019, arXiv 1811.06965) and 1F1B (Narayanan et al. 2019, PipeDream, flushed every step) have one
stage per rank and run in torch's own loops. Every other schedule is a list of actions that torch's runtime follows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from labkit.plan import Plan
from labkit.rank.data_parallel import GradientSum
from labkit.rank.recorder import Recorder, num_bytes

GROUP = "pp"


class OneForwardOneBackward(Schedule1F1B):
    """torch's 1F1B, also for fewer micro-batches than stages: it refuses those, but its loop handles them."""

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: Any) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, **options)

    def _get_pipeline_order(self) -> None:
        """The order as torch would draw it; nothing here reads it."""


SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": OneForwardOneBackward}


class Runtime(_PipelineScheduleRuntime):
    """torch's runtime for lists of actions, over one or several stages of this rank.

    It gathers sharded parameters where they compute, as one stage alone does, and keeps losses by micro-batch: torch
    counts on the last stage's forwards to come in order.
    """

    def __init__(self, stages: list["Stage"], plan: Plan, **options: Any) -> None:
        super().__init__(stages, plan.layout.num_microbatches, **options)
        self._loss_of: dict[int, Tensor] = {}
        lines: dict[int, list[_Action | None]] = {
            rank: [_Action.from_str(str(action)) for action in line] for rank, line in enumerate(plan.actions)
        }
        self._prepare_schedule_with_comms(lines)
        gathers = (_ComputationType.UNSHARD, _ComputationType.RESHARD)
        self.pipeline_order_with_comms = {
            rank: [action for action in line if action.computation_type not in gathers]
            for rank, line in self.pipeline_order_with_comms.items()
        }

    def _assert_unsharded(self, stage: Any) -> None:
        """Nothing to check: modules gather by themselves."""

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: dict[str, Any] | None = None
    ) -> None:
        if self._should_compute_loss(stage):
            self._loss_of[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._loss_of[mb_index] if self._should_compute_loss(stage) else None

    def _update_losses(self, stages: Any, losses: list[Tensor] | None) -> None:
        if losses is not None:
            losses[:] = [self._loss_of[index] for index in sorted(self._loss_of)]
        self._loss_of.clear()


class Stage(PipelineStage):
    """A pipeline stage that records what it does.

    A receive lasts from when the schedule asks for it to when its forward or backward can begin, so it contains the
    wait for the neighbour; a send is recorded as it is posted.

    Args:
        net: the stage's layers.
        plan: the plan.
        index: which stage.
        device: where it computes.
        group: the pipeline's ranks.
        recorder: gets the actions.
        gradient_sum: adds up the stage's gradients over dp once they are complete; None where `net` does it itself.
    """

    def __init__(
        self,
        net: nn.Module,
        plan: Plan,
        index: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        recorder: Recorder,
        gradient_sum: GradientSum | None = None,
    ) -> None:
        model, size = plan.model, plan.layout.microbatch_size
        tokens = torch.empty(size, model.seq_len, dtype=torch.int64, device="meta")
        length = model.seq_len // (plan.layout.tp if plan.layout.sequence_parallel else 1)
        stream = torch.empty(size, length, model.d_model, device="meta", requires_grad=True)
        vocabulary = model.vocab_size // plan.layout.tp
        logits = torch.empty(size, model.seq_len, vocabulary, device="meta", requires_grad=True)
        super().__init__(
            net,
            index,
            plan.num_stages,
            device,
            input_args=tokens if index == 0 else stream,
            output_args=logits if index == plan.num_stages - 1 else stream,
            group=group,
        )
        self.gradient_sum = gradient_sum
        self._recorder = recorder
        self._asked: dict[tuple[str, int], tuple[Any, list[dist.P2POp]]] = {}
        self._began: Any = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Called before the wait for the activations of a micro-batch."""
        return self._ask("RECV_F", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Called before the wait for the gradients of a micro-batch."""
        return self._ask("RECV_B", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Called when the activations of a micro-batch are ready to go."""
        return self._send("SEND_F", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Called when the gradients of a micro-batch are ready to go."""
        return self._send("SEND_B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run a forward; on the last stage the loss that follows belongs to it (`end_forward`)."""
        self._receive("RECV_F", fwd_chunk_id)
        self._began = self._recorder.begin(fwd_chunk_id, self.stage_index)
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.is_last:
            self.end_forward()
        return output

    def end_forward(self) -> None:
        """The forward under way is over."""
        self._recorder.end("F", self._began)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a backward, whole or of the input alone."""
        self._receive("RECV_B", bwd_chunk_id)
        start = self._recorder.begin(bwd_chunk_id, self.stage_index)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._recorder.end("B" if full_backward else "I", start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the backward of the weights that was left out before."""
        start = self._recorder.begin(bwd_chunk_id, self.stage_index)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._recorder.end("W", start)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward; half a backward finds its weights by `parameters()`, so these are the gathered ones.

        Where a later forward dropped them, torch would look for the shards in a graph that was built on the gathered
        weights, find none, and leave out their gradients in silence.
        """
        if backward_type != "full" and isinstance(self.submod, FSDPModule):
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The gradients are complete: add them up over dp."""
        super().perform_reduce_grad(grad_scale_factor)
        if self.gradient_sum is not None:
            self.gradient_sum.begin()

    def _ask(self, kind: str, microbatch: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if operations and self._recorder.on:
            self._asked[kind, microbatch] = (self._recorder.mark(), operations)
        return operations

    def _receive(self, kind: str, microbatch: int) -> None:
        asked = self._asked.pop((kind, microbatch), None)
        if asked is not None:
            self._message(kind, asked[0], microbatch, asked[1])

    def _send(self, kind: str, microbatch: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if operations and self._recorder.on:
            self._message(kind, self._recorder.mark(), microbatch, operations)
        return operations

    def _message(self, kind: str, start: Any, microbatch: int, operations: list[dist.P2POp]) -> None:
        self._recorder.add(
            kind,
            start,
            stage=self.stage_index,
            microbatch=microbatch,
            group=GROUP,
            num_bytes=sum(num_bytes(operation.tensor) for operation in operations),
            peer=operations[0].peer,
        )


def has_loop(plan: Plan) -> bool:
    """Whether torch has a loop of its own for the plan's schedule."""
    return plan.layout.schedule in SCHEDULES


class Pipeline:
    """Forward and backward of every micro-batch through a pipeline, as seen from one rank.

    Args:
        stages: this rank's stages, in the model's order.
        plan: gives schedule and micro-batches.
        loss: a micro-batch's mean of logits and targets.
        loss_scale: 1 / (micro-batches of all dp ranks).
    """

    def __init__(
        self, stages: Sequence[Stage], plan: Plan, loss: Callable[[Tensor, Tensor], Tensor], loss_scale: float
    ) -> None:
        self._stages = list(stages)
        self._mean_loss = loss
        self._loss_scale = loss_scale
        self._schedule: PipelineScheduleSingle | Runtime
        if has_loop(plan):
            self._schedule = SCHEDULES[plan.layout.schedule](
                self._stages[0], plan.layout.num_microbatches, loss_fn=self._loss, scale_grads=False
            )
        else:
            self._schedule = Runtime(self._stages, plan, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        loss = self._mean_loss(logits_BSV, targets_BS) * self._loss_scale
        self._stages[-1].end_forward()
        return loss

    def __call__(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Run a step's micro-batches; gradients stay in the parameters.

        Runs on: the ranks of a pp group at once. Shapes: B is all samples of this dp rank.

        Returns:
            This rank's share of the global mean loss, a scalar; 0 where it does not hold the last stage.
        """
        losses: list[Tensor] = []
        inputs = (tokens_BS,) if self._stages[0].is_first else ()
        targets = targets_BS if self._stages[-1].is_last else None
        self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        for stage in self._stages:
            if stage.gradient_sum is not None:
                stage.gradient_sum.end()
        if not losses:
            return torch.zeros((), device=self._stages[0].device)
        return torch.stack([loss.detach() for loss in losses]).sum()
