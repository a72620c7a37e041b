"""Data parallelism, and the step of a rank that holds the whole depth of the model.

dp ranks take different samples and add up their gradients. They hold equal parameters (DistributedDataParallel, or
under tensor parallelism torch's composable `replicate`), or each a shard of them (`fully_shard`, ZeRO-2 and 3). The
loss is scaled by the share of the global batch beforehand, so sums are means.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from labkit.rank.model import Transformer
from labkit.rank.recorder import Recorder, num_bytes

GROUP = "dp"


def wrap(stage: Transformer, mesh: DeviceMesh, *, has_shards: bool, recorder: Recorder) -> nn.Module:
    """Let a stage add up its gradients over dp.

    Runs on: the ranks of a dp group at once. Communicates: a check of shapes now; all-reduces of the gradients in every
    later step's last backward.

    Args:
        stage: parameters that are already equal on all ranks of the group.
        mesh: the dp axis.
        has_shards: whether tensor parallelism made DTensors of parameters.
        recorder: gets the all-reduces.
    """
    if has_shards:
        stage.register_forward_hook(_unmark_view)
        replicated = replicate(stage, mesh=mesh)
        timed = _TimedReduce(recorder)
        replicated.set_gradient_divide_factor(1.0)
        replicated.set_custom_reduce_scatter(timed)
        replicated.set_all_reduce_hook(timed.reduced)
        return stage
    wrapped = DistributedDataParallel(
        stage,
        process_group=mesh.get_group(),
        init_sync=False,
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook((mesh.get_group(), recorder), _add_up)
    return wrapped


def shard(stage: Transformer, mesh: DeviceMesh, *, reshard: bool, has_shards: bool, recorder: Recorder) -> nn.Module:
    """Give every dp rank a shard of each parameter, its gradient and its optimizer state (Zhao et al. 2023).

    A layer is gathered whole just before it computes.

    Runs on: the ranks of a dp group at once. Communicates: all-gathers of the parameters in every later step, a
    reduce-scatter of the gradients in its last backward.

    Args:
        stage: parameters that are already equal on all ranks of the group.
        mesh: the dp axis; or replicas x shards, where shards are equal on all replicas (hybrid sharding).
        reshard: whether a layer's parameters are dropped after its forward and gathered again for its backward
            (ZeRO-3), or kept until the backward is over (ZeRO-2).
        has_shards: whether tensor parallelism made DTensors of parameters.
        recorder: gets the collectives.
    """
    if has_shards:
        stage.register_forward_hook(_unmark_view)
    for module in (*stage.layers.values(), stage):
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows sums only
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_custom_all_gather(_TimedAllGather(recorder))
        timed = _TimedReduce(recorder)
        sharded.set_custom_reduce_scatter(timed)
        if mesh.ndim > 1:
            sharded.set_all_reduce_hook(timed.reduced)
    return stage


def _unmark_view(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    """FSDP and `replicate` distrust an output marked as a view, as a gathered DTensor is; the memory stays the same."""
    return torch.ops.aten._unsafe_view(output, output.shape)


def _add_up(
    state: tuple[dist.ProcessGroup, Recorder],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """All-reduce one bucket of gradients and record it."""
    group, recorder = state
    buffer, start = bucket.buffer(), recorder.mark()

    def reduced(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        result = future.value()[0]
        recorder.add("all_reduce", start, group=GROUP, num_bytes=num_bytes(result))
        return result

    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(reduced)


class GradientSum:
    """Adds up a stage's gradients over dp when they are complete, beside what its rank computes next.

    For stages whose backward may be split: the weights' half goes past the hooks that DistributedDataParallel and
    `replicate` listen to, so that they would add up nothing.

    Args:
        module: the stage.
        group: the dp ranks.
        recorder: gets the all-reduce.
        stage: the stage's number.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, recorder: Recorder, stage: int) -> None:
        self._module, self._group = module, group
        self._recorder, self._stage = recorder, stage
        self._gradients: list[Tensor] = []
        self._sum: torch.futures.Future[Tensor] | None = None

    def begin(self) -> None:
        """Runs on: the ranks of a dp group at once. Communicates: one all-reduce of all gradients."""
        whole = (parameter.grad for parameter in self._module.parameters() if parameter.grad is not None)
        with torch.no_grad():
            self._gradients = [each.to_local() if isinstance(each, DTensor) else each for each in whole]
            packed, start = torch.cat([each.reshape(-1) for each in self._gradients]), self._recorder.mark()

        def summed(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            result = future.value()[0]
            self._recorder.add("all_reduce", start, stage=self._stage, group=GROUP, num_bytes=num_bytes(result))
            return result

        work = dist.all_reduce(packed, group=self._group, async_op=True)
        self._sum = work.get_future().then(summed)

    def end(self) -> None:
        """Wait for the sums and put them where the gradients were."""
        if self._sum is None:
            return
        parts = self._sum.wait().split([each.numel() for each in self._gradients])
        views = [part.view_as(each) for part, each in zip(parts, self._gradients, strict=True)]
        torch._foreach_copy_(self._gradients, views)
        self._sum, self._gradients = None, []


class _TimedAllGather(DefaultAllGather):
    """Gathers parameters and records it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        start = self._recorder.mark()
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        _finish(work)
        self._recorder.add("all_gather", start, group=GROUP, num_bytes=num_bytes(output_tensor))
        return work


class _TimedReduce(DefaultReduceScatter):
    """Adds up gradients and records it: a reduce-scatter over shards, then an all-reduce over replicas, or one of them.

    torch allocates through this interface before the first of them, and calls a hook after the all-reduce.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._start: Any = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._start = self._recorder.mark()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        _finish(work)
        self._recorder.add("reduce_scatter", self._start, group=GROUP, num_bytes=num_bytes(input_tensor))
        self._start = self._recorder.mark()
        return work

    def reduced(self, gradients: Tensor) -> None:
        """Called after each all-reduce with its result."""
        self._recorder.add("all_reduce", self._start, group=GROUP, num_bytes=num_bytes(gradients))


def _finish(work: dist.Work | None) -> None:
    """Wait on the CPU, where nothing overlaps; on a GPU the stream's marks tell."""
    if work is not None and not torch.cuda.is_available():
        work.wait()


class Accumulation:
    """Forward and backward of every micro-batch on a rank that holds all layers.

    Args:
        net: the wrapped model.
        loss: a micro-batch's mean of logits and targets.
        num_microbatches: into how many the rank's samples are split.
        loss_scale: 1 / (micro-batches of all dp ranks).
        recorder: gets forwards and backwards.
        keeps_gathered: whether sharded parameters stay whole from one micro-batch to the next (ZeRO-2).
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        num_microbatches: int,
        loss_scale: float,
        recorder: Recorder,
        *,
        keeps_gathered: bool = False,
    ) -> None:
        self._net = net
        self._loss = loss
        self._keeps_gathered = keeps_gathered
        self._num_microbatches = num_microbatches
        self._loss_scale = loss_scale
        self._recorder = recorder

    def __call__(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Run a step's micro-batches; gradients stay in the parameters.

        Shapes: B is all samples of this dp rank.

        Returns:
            This rank's share of the global mean loss, a scalar.
        """
        losses = []
        pairs = zip(tokens_BS.chunk(self._num_microbatches), targets_BS.chunk(self._num_microbatches), strict=True)
        for index, (tokens, targets) in enumerate(pairs):
            with self._communication(index == self._num_microbatches - 1):
                losses.append(self._microbatch(index, tokens, targets))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _microbatch(self, index: int, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        recorder = self._recorder
        start = recorder.begin(index)
        loss = self._loss(self._net(tokens_BS), targets_BS)
        if self._loss_scale != 1.0:
            loss = loss * self._loss_scale
        recorder.end("F", start)
        start = recorder.begin(index)
        loss.backward()  # type: ignore[no-untyped-call]
        recorder.end("B", start)
        return loss.detach()

    def _communication(self, is_last: bool) -> AbstractContextManager[None]:
        """Replicas add up gradients in the last micro-batch's backward; shards in each, to keep no whole gradient."""
        net = self._net
        if isinstance(net, FSDPModule):  # `replicate` makes one too
            net.set_is_last_backward(is_last)
            if isinstance(net, ReplicateModule):
                net.set_requires_gradient_sync(is_last)
            elif self._keeps_gathered:
                net.set_reshard_after_backward(is_last)
        elif isinstance(net, DistributedDataParallel) and not is_last:
            return net.no_sync()
        return nullcontext()
