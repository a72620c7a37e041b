"""Data parallelism, and the step of a rank that holds the whole depth of the model.

dp ranks hold equal parameters, take different samples, and add up their gradients in the last micro-batch's backward:
by DistributedDataParallel, or under tensor parallelism by torch's composable `replicate`. The loss is scaled by the
share of the global batch beforehand, so sums are means.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn.parallel import DistributedDataParallel

from labkit.rank.model import Transformer, mean_loss
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
        timer = _ReplicateTimer(recorder)
        replicated.set_gradient_divide_factor(1.0)
        replicated.set_custom_reduce_scatter(timer)
        replicated.set_all_reduce_hook(timer.reduced)
        return stage
    wrapped = DistributedDataParallel(
        stage,
        process_group=mesh.get_group(),
        init_sync=False,
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook((mesh.get_group(), recorder), _add_up)
    return wrapped


def _unmark_view(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    """`replicate` distrusts an output marked as a view, which a gathered DTensor is; the memory stays the same."""
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


class _ReplicateTimer(ReduceScatter):
    """Times the all-reduce of `replicate`: from the allocation of its buffer to the hook after it.

    `replicate` has no reduce-scatter; it only allocates through this interface.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._start: Any = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._start = self._recorder.mark()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        raise NotImplementedError("replicated parameters are not scattered")

    def reduced(self, gradients: Tensor) -> None:
        """Called after each all-reduce with its result."""
        self._recorder.add("all_reduce", self._start, group=GROUP, num_bytes=num_bytes(gradients))


class Accumulation:
    """Forward and backward of every micro-batch on a rank that holds all layers.

    Args:
        net: the wrapped model.
        num_microbatches: into how many the rank's samples are split.
        loss_scale: 1 / (micro-batches of all dp ranks).
        recorder: gets forwards and backwards.
    """

    def __init__(self, net: nn.Module, num_microbatches: int, loss_scale: float, recorder: Recorder) -> None:
        self._net = net
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
        loss = mean_loss(self._net(tokens_BS), targets_BS)
        if self._loss_scale != 1.0:
            loss = loss * self._loss_scale
        recorder.end("F", start)
        start = recorder.begin(index)
        loss.backward()  # type: ignore[no-untyped-call]
        recorder.end("B", start)
        return loss.detach()

    def _communication(self, is_last: bool) -> AbstractContextManager[None]:
        """Only the last micro-batch's backward communicates."""
        net = self._net
        if isinstance(net, ReplicateModule):
            net.set_is_last_backward(is_last)
            net.set_requires_gradient_sync(is_last)
        elif isinstance(net, DistributedDataParallel) and not is_last:
            return net.no_sync()
        return nullcontext()
