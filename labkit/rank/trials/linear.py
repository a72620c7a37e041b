"""Trials of linear layers that are split over a group by hand (Shoeybi et al. 2019, arXiv 1909.08053, section 3)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.rank.trials.attempt import as_plain, device
from labkit.rank.trials.traffic import Traffic

__all__ = ["chained", "column", "row"]

Answers = Mapping[str, Callable[..., Any]]
Matrix = Sequence[Sequence[float]]


def column(
    answers: Answers,
    group: dist.ProcessGroup,
    *,
    x: Matrix,
    weight: Matrix,
    bias: Sequence[float],
    upstream: Matrix,
    backward: bool,
) -> dict[str, Any]:
    """Have the answer compute this member's columns of `x weight^T + bias`, and with `backward` their gradients.

    Runs on: every member. Communicates: what the answer does. Shapes, whole: x `[batch, d_in]`, weight `[d_out, d_in]`,
    bias `[d_out]`, upstream (the gradient of the output) `[batch, d_out]`.
    """
    leaves = {"x": _leaf(x), "weight": _part(weight, group, 0), "bias": _part(bias, group, 0)}
    return _tried(
        lambda: answers["column_parallel"](*leaves.values(), group),
        leaves,
        _part(upstream, group, 1).detach() if backward else None,
    )


def row(
    answers: Answers,
    group: dist.ProcessGroup,
    *,
    x: Matrix,
    weight: Matrix,
    bias: Sequence[float],
    upstream: Matrix,
    backward: bool,
) -> dict[str, Any]:
    """Have the answer compute the whole of `x weight^T + bias` from this member's columns of x and weight.

    Runs on: every member. Communicates: what the answer does. Shapes: those of `column`.
    """
    leaves = {"x": _part(x, group, 1), "weight": _part(weight, group, 1), "bias": _leaf(bias)}
    return _tried(
        lambda: answers["row_parallel"](*leaves.values(), group),
        leaves,
        _leaf(upstream).detach() if backward else None,
    )


def chained(
    answers: Answers,
    group: dist.ProcessGroup,
    *,
    x: Matrix,
    up: Matrix,
    up_bias: Sequence[float],
    down: Matrix,
    down_bias: Sequence[float],
    upstream: Matrix,
    residual: bool,
) -> dict[str, Any]:
    """Have the answers compute `relu(x up^T + up_bias) down^T + down_bias`, plus x with `residual`, and all gradients.

    Runs on: every member. Communicates: what the answers do. Shapes, whole: x `[batch, d_in]`, up `[d_hidden, d_in]`,
    down `[d_out, d_hidden]`, upstream `[batch, d_out]`; with `residual` d_out is d_in.
    """
    leaves = {
        "x": _leaf(x),
        "up": _part(up, group, 0),
        "up_bias": _part(up_bias, group, 0),
        "down": _part(down, group, 1),
        "down_bias": _leaf(down_bias),
    }

    def forward() -> Any:
        hidden = torch.relu(answers["column_parallel"](leaves["x"], leaves["up"], leaves["up_bias"], group))
        out = answers["row_parallel"](hidden, leaves["down"], leaves["down_bias"], group)
        return leaves["x"] + out if residual else out

    return _tried(forward, leaves, _leaf(upstream).detach())


def _tried(forward: Callable[[], Any], leaves: Mapping[str, Tensor], upstream: Tensor | None) -> dict[str, Any]:
    """The output, what each direction communicated, and the gradients; without them where there is nothing to derive.

    Runs on: every member. Communicates: what `forward` and its backward do.
    """
    with Traffic() as there:
        output = forward()
    told = {"output": as_plain(output), "forward": there.calls, "tracked": False, "backward": [], "gradients": {}}
    if upstream is None or not isinstance(output, Tensor) or output.shape != upstream.shape:
        return told
    if not output.requires_grad:
        return told
    # In this thread, on a GPU too: the traffic is counted where it runs.
    with torch.autograd.set_multithreading_enabled(False), Traffic() as back:
        output.backward(upstream)
    gradients = {name: as_plain(leaf.grad) for name, leaf in leaves.items()}
    return told | {"tracked": True, "backward": back.calls, "gradients": gradients}


def _leaf(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device(), requires_grad=True)


def _part(values: Any, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This member's part of a tensor that is split evenly along `dim`."""
    parts = torch.tensor(values, dtype=torch.float32, device=device()).chunk(dist.get_world_size(group), dim)
    return parts[dist.get_rank(group)].clone().contiguous().requires_grad_()
