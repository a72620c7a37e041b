"""DeepSpeed's own pipeline: one stage per rank, 1F1B, its instructions followed one by one and recorded.

DeepSpeed runs a whole step in one call, update included. Here its schedule is followed up to the update, so that a loss
that is not finite can still be refused.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.plan import Plan
from labkit.rank.mesh import Mesh
from labkit.rank.model import mean_loss
from labkit.rank.recorder import Recorder

GROUP = "pp"


class _Built(nn.Module):
    """What DeepSpeed builds for a stage: nothing, for the stage is there already."""

    def __new__(cls, stage: nn.Module) -> nn.Module:  # type: ignore[misc]
        return stage


def module(stage: nn.Module, plan: Plan) -> Any:
    """Wrap this rank's stage as DeepSpeed's pipeline wants it. Communicates: DeepSpeed makes its groups."""
    pipe = importlib.import_module("deepspeed.pipe")
    topology = importlib.import_module("deepspeed.runtime.pipe.topology")
    specifications = [pipe.LayerSpec(_Built, stage) for _ in range(plan.layout.pp)]
    return pipe.PipelineModule(
        specifications,
        topology=topology.PipeDataParallelTopology(num_pp=plan.layout.pp, num_dp=plan.layout.dp),
        loss_fn=mean_loss,
        partition_method="uniform",
    )


class Pipeline:
    """Forward and backward of every micro-batch, as DeepSpeed's schedule orders them on this rank."""

    def __init__(self, engine: Any, plan: Plan, own: Mesh, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder
        self._num_microbatches = plan.layout.num_microbatches
        self._loss_scale = 1.0 / (plan.layout.num_microbatches * plan.layout.dp)
        self._stage = own.place.pp_rank
        self._is_last = self._stage == plan.layout.pp - 1
        neighbour = {"F": self._stage + 1, "B": self._stage - 1}
        peers = {
            kind: plan.rank_at(dp_rank=own.place.dp_rank, pp_rank=pp_rank)
            for kind, pp_rank in neighbour.items()
            if 0 <= pp_rank < plan.layout.pp
        }
        self._peers = {
            "SEND_F": peers.get("F"),
            "RECV_B": peers.get("F"),
            "RECV_F": peers.get("B"),
            "SEND_B": peers.get("B"),
        }
        # The residual stream of a micro-batch, or its gradient: fp32 also under autocast.
        self._message_bytes = 4 * plan.layout.microbatch_size * plan.model.seq_len * plan.model.d_model
        self._counts: Counter[str] = Counter()

    def __call__(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Run a step's micro-batches; gradients are added up over dp.

        Returns:
            This rank's share of the global mean loss: 0 but on the last stage.
        """
        engine, parts = self._engine, self._num_microbatches
        engine.set_dataiterator(iter(list(zip(tokens_BS.chunk(parts), targets_BS.chunk(parts), strict=True))))
        engine.module.train()
        engine.total_loss, engine.total_additional_losses, engine._compute_loss = None, None, True
        schedule = engine._train_schedule()
        engine._reserve_pipe_buffers(schedule.num_pipe_buffers())
        engine.fwd_outputs = []
        self._counts.clear()
        for instructions in schedule:
            for instruction in instructions:
                if type(instruction).__name__ != "OptimizerStep":
                    self._follow(type(instruction), instruction.kwargs)
        if not self._is_last:
            return torch.zeros((), device=tokens_BS.device)
        total: Tensor = engine.total_loss
        return total.detach() * self._loss_scale

    def _follow(self, kind: type, options: dict[str, Any]) -> None:
        run: Callable[..., None] = self._engine._INSTRUCTION_MAP[kind]
        recorder, name = self._recorder, kind.__name__
        if name in ("ForwardPass", "BackwardPass"):
            microbatch = self._count(name)
            start = recorder.begin(microbatch, self._stage)
            run(self._engine, **options)
            recorder.end(name[0], start)
            return
        start = recorder.mark()
        run(self._engine, **options)
        if name in _MESSAGES and recorder.on:
            recorder.add(
                _MESSAGES[name],
                start,
                stage=self._stage,
                microbatch=self._count(name),
                group=GROUP,
                num_bytes=self._message_bytes,
                peer=self._peers[_MESSAGES[name]],
            )

    def _count(self, name: str) -> int:
        """The number of the micro-batch: each kind of instruction meets them in order."""
        self._counts[name] += 1
        return self._counts[name] - 1


_MESSAGES = {"SendActivation": "SEND_F", "RecvActivation": "RECV_F", "SendGrad": "SEND_B", "RecvGrad": "RECV_B"}
