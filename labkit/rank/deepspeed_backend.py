"""DeepSpeed's way to torch.distributed, over the ranks of one layout, with every collective recorded.

DeepSpeed takes its world for its data-parallel group, and asks all of it for barriers and groups. A layout may do
without some ranks, so here its world is the layout's ranks. Imports DeepSpeed: `deepspeed_library.load` comes first.
"""

import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.comm.torch import TorchBackend
from torch import Tensor

from labkit.plan import AXES
from labkit.rank.mesh import Mesh
from labkit.rank.recorder import Recorder, num_bytes

# The names that torch 2.13 gives them; under the old ones it warns with every call.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RecordedBackend(TorchBackend):  # type: ignore[misc]
    """Collectives over the layout's ranks unless a group is named.

    Args:
        own: the layout's groups; its ranks are the first of torch's world.
        recorder: gets the collectives.
    """

    def __init__(self, own: Mesh, recorder: Recorder) -> None:
        self._group = group = own.members or own.group("dp")
        self._recorder = recorder
        known = (group, *(own.group(axis) for axis in AXES))
        self._groups = {tuple(dist.get_process_group_ranks(one)): one for one in reversed(known)}
        self._axes = {tuple(dist.get_process_group_ranks(own.group(axis))): axis for axis in ("pp", "dp")}
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(dist.get_backend(group), datetime.timedelta(minutes=30), None)

    def get_rank(self, group: dist.ProcessGroup | None = None) -> int:
        """This rank's number in a group."""
        return self._rank if group is None else dist.get_rank(group)

    def get_world_size(self, group: dist.ProcessGroup | None = None) -> int:
        """Ranks of a group."""
        return self._size if group is None else dist.get_world_size(group)

    def is_initialized(self) -> bool:
        """Also when the groups are gone: DeepSpeed asks for its rank while it lets go of a module."""
        return True

    def get_world_group(self) -> dist.ProcessGroup:
        """The layout's ranks."""
        return self._group

    def new_group(self, ranks: Iterable[int]) -> Any:
        """Return the layout's group of these ranks: DeepSpeed asks for those that the mesh has already."""
        wanted = tuple(ranks)
        if dist.get_rank() not in wanted:
            return dist.GroupMember.NON_GROUP_MEMBER
        return self._groups[wanted]

    def barrier(
        self, group: dist.ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None
    ) -> Any:
        """Wait for every rank of a group."""
        own = self._group if group is None or group is dist.GroupMember.WORLD else group
        return dist.barrier(group=own, async_op=async_op, device_ids=device_ids)

    def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> Any:
        """Record and pass on."""
        call, own = super().all_reduce, group or self._group
        return self._record("all_reduce", own, num_bytes(tensor), lambda: call(tensor, op, own, async_op))

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: Any = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Record and pass on."""
        call, own = super().reduce, group or self._group
        return self._record("reduce", own, num_bytes(tensor), lambda: call(tensor, dst, op, own, async_op))

    def broadcast(
        self, tensor: Tensor, src: int, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> Any:
        """Record and pass on."""
        call, own = super().broadcast, group or self._group
        return self._record("broadcast", own, num_bytes(tensor), lambda: call(tensor, src, own, async_op))

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: Any = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Record and pass on."""
        call, own, size = super().reduce_scatter, group or self._group, sum(map(num_bytes, input_list))
        return self._record("reduce_scatter", own, size, lambda: call(output, input_list, op, own, async_op))

    def reduce_scatter_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Record and pass on."""
        own, sent = group or self._group, self._reduce_op(op)
        return self._record(
            "reduce_scatter",
            own,
            num_bytes(input_tensor),
            lambda: _reduce_scatter(output_tensor, input_tensor, sent, own, async_op),
        )

    def all_gather(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Record and pass on."""
        call, own, size = super().all_gather, group or self._group, sum(map(num_bytes, tensor_list))
        return self._record("all_gather", own, size, lambda: call(tensor_list, tensor, own, async_op))

    def all_gather_into_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """Record and pass on."""
        own, size = group or self._group, num_bytes(output_tensor)
        return self._record("all_gather", own, size, lambda: _all_gather(output_tensor, input_tensor, own, async_op))

    def _record(self, kind: str, group: dist.ProcessGroup, size: int, call: Callable[[], Any]) -> Any:
        """Call; record what it took, of an asynchronous one when it is done. A group of no axis is "world"."""
        recorder = self._recorder
        if not recorder.on:
            return call()
        axis = self._axes.get(tuple(dist.get_process_group_ranks(group)), "world")
        start, work = recorder.mark(), call()
        if work is None:
            recorder.add(kind, start, group=axis, num_bytes=size)
        else:
            work.get_future().then(lambda _: recorder.add(kind, start, group=axis, num_bytes=size))
        return work
