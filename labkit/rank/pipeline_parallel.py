"""Pipeline parallelism by torch's pipelining: one stage per rank, GPipe or 1F1B.

GPipe: Huang et al. 2019, arXiv 1811.06965. 1F1B: Narayanan et al. 2019 (PipeDream), flushed every step.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from labkit.plan import Plan
from labkit.rank.model import mean_loss
from labkit.rank.recorder import Recorder, num_bytes

GROUP = "pp"


class OneForwardOneBackward(Schedule1F1B):
    """torch's 1F1B, also for fewer micro-batches than stages: it refuses those, but its loop handles them."""

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: Any) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, **options)

    def _get_pipeline_order(self) -> None:
        """The order as torch would draw it; nothing here reads it."""


SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": OneForwardOneBackward}


class Stage(PipelineStage):
    """A pipeline stage that records what it does.

    A receive lasts from when the schedule asks for it to when its forward or backward can begin, so it contains the
    wait for the neighbour; a send is recorded as it is posted.
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
    ) -> None:
        model, size = plan.model, plan.layout.microbatch_size
        tokens = torch.empty(size, model.seq_len, dtype=torch.int64, device="meta")
        length = model.seq_len // (plan.layout.tp if plan.layout.sequence_parallel else 1)
        stream = torch.empty(size, length, model.d_model, device="meta", requires_grad=True)
        logits = torch.empty(size, model.seq_len, model.vocab_size, device="meta", requires_grad=True)
        super().__init__(
            net,
            index,
            plan.num_stages,
            device,
            input_args=tokens if index == 0 else stream,
            output_args=logits if index == plan.num_stages - 1 else stream,
            group=group,
        )
        self._recorder = recorder
        self._asked: Any = None
        self._began: Any = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Called just before the wait for the activations of a micro-batch."""
        return self._ask(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Called just before the wait for the gradients of a micro-batch."""
        return self._ask(super().get_bwd_recv_ops(bwd_chunk_id))

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
        self._began = self._recorder.begin(fwd_chunk_id)
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
        """Run a backward."""
        self._receive("RECV_B", bwd_chunk_id)
        start = self._recorder.begin(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._recorder.end("B", start)

    def _ask(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if operations and self._recorder.on:
            self._asked = (self._recorder.mark(), operations)
        return operations

    def _receive(self, kind: str, microbatch: int) -> None:
        if self._asked is None:
            return
        start, operations = self._asked
        self._asked = None
        self._message(kind, start, microbatch, operations)

    def _send(self, kind: str, microbatch: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if operations and self._recorder.on:
            self._message(kind, self._recorder.mark(), microbatch, operations)
        return operations

    def _message(self, kind: str, start: Any, microbatch: int, operations: list[dist.P2POp]) -> None:
        size = sum(num_bytes(operation.tensor) for operation in operations)
        self._recorder.add(kind, start, microbatch=microbatch, group=GROUP, num_bytes=size, peer=operations[0].peer)


class Pipeline:
    """Forward and backward of every micro-batch through a pipeline, as seen from one stage.

    Args:
        stage: this rank's stage.
        plan: gives schedule and micro-batches.
        loss_scale: 1 / (micro-batches of all dp ranks).
    """

    def __init__(self, stage: Stage, plan: Plan, loss_scale: float) -> None:
        self._stage = stage
        self._loss_scale = loss_scale
        self._schedule = SCHEDULES[plan.layout.schedule](
            stage, plan.layout.num_microbatches, loss_fn=self._loss, scale_grads=False
        )

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        loss = mean_loss(logits_BSV, targets_BS) * self._loss_scale
        self._stage.end_forward()
        return loss

    def __call__(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Run a step's micro-batches; gradients stay in the parameters.

        Runs on: the ranks of a pp group at once. Shapes: B is all samples of this dp rank.

        Returns:
            This rank's share of the global mean loss, a scalar; 0 where it does not hold the last stage.
        """
        losses: list[Tensor] = []
        inputs = (tokens_BS,) if self._stage.is_first else ()
        targets = targets_BS if self._stage.is_last else None
        self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        if not losses:
            return torch.zeros((), device=self._stage.device)
        return torch.stack([loss.detach() for loss in losses]).sum()
