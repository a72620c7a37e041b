"""Counts what an answer sends: every c10d operation of this thread, whatever Python name it was called by."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Traffic"]

_NAMESPACES = ("c10d", "_c10d_functional")
# c10d's name of an operation -> torch.distributed's name, whichever of its forms was called.
_NAMES = {
    "send": "send",
    "isend": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "irecv": "recv",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "monitored_barrier_": "barrier",
}
# Followers of an operation that was counted already, and checks that send nothing.
_QUIET = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")
# Operations whose third argument is the other rank; that of a recv from anybody is a tag.
_WITH_PEER = ("send", "recv_")


class Traffic(TorchDispatchMode):  # type: ignore[misc]
    """Within it, `calls` grows by `[operation, bytes, peer]` for each communication of this thread, in order.

    Bytes are those of the largest side: the full tensor of an all_reduce, the input of a reduce_scatter, the output of
    an all_gather, the message of a send or recv; none for a barrier. The peer is the rank within the group for a send
    or a recv from one rank, else -1. Backward passes are seen too: on the CPU autograd runs in the calling thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass on and count."""
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if func.namespace in _NAMESPACES and name not in _QUIET:
            operation = _NAMES.get(name, name)
            # A functional collective makes its output: an all_gather's largest side is not among its arguments.
            num_bytes = 0 if operation == "barrier" else _largest((*args, result))
            peer = args[2] if name in _WITH_PEER and type(args[2]) is int else -1
            self.calls.append([operation, num_bytes, peer])
        return result

    def count(self, operation: str) -> int:
        """How often an operation was called."""
        return sum(one[0] == operation for one in self.calls)


def _largest(values: Any) -> int:
    """Bytes of the largest tensor, or list of tensors, among these."""
    return max((_num_bytes(one) for one in values), default=0)


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_num_bytes(one) for one in value) if isinstance(value, list | tuple) else 0
