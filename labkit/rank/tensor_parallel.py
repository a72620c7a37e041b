"""Tensor parallelism of a stage by DTensor (Shoeybi et al. 2019, arXiv 1909.08053).

Query, key, value, gate and up are split by columns; output and down by rows, whose partial sums one all-reduce adds; so
attention and feed-forward each communicate once forward and once backward. The embedding and the head are split by
vocabulary: the embedding's lookups are all-reduced, the head's logits all-gathered.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from labkit.rank.model import Transformer
from labkit.rank.recorder import Recorder, num_bytes

GROUP = "tp"


def shard(stage: Transformer, mesh: DeviceMesh, recorder: Recorder) -> dict[str, int]:
    """Split a stage's matrices over tp; every rank keeps its part of what it already holds.

    Runs on: the ranks of a tp group. Communicates: nothing now; all-reduces in every later forward and backward.

    Returns:
        Name of every split parameter -> the dimension it is split along.
    """
    styles = _styles(stage)
    modules = dict(stage.named_modules())
    closers = [close for name, style in styles.items() for close in _watch(modules[name], style, recorder)]
    parallelize_module(stage, mesh, styles, src_data_rank=None)
    stage.tie()
    for close in closers:
        close()
    return {
        name: placement.dim  # type: ignore[attr-defined]
        for name, parameter in stage.named_parameters()
        if isinstance(parameter, DTensor)
        for placement in parameter.placements
        if placement.is_shard()
    }


def _styles(stage: Transformer) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    if stage.embedding is not None:
        styles["embedding"] = RowwiseParallel(input_layouts=Replicate())
    if stage.head is not None:
        styles["head"] = ColwiseParallel(output_layouts=Replicate())
    for index in stage.layers:
        attention, feed_forward = f"layers.{index}.attention", f"layers.{index}.feed_forward"
        # One DTensor for all columns: their gradients add up before the one all-reduce.
        styles[attention] = _whole_input((Replicate(), None))
        styles[feed_forward] = _whole_input((Replicate(),))
        columns = [f"{attention}.{name}" for name in ("query", "key", "value")] + [f"{feed_forward}.up"]
        if stage.model.activation == "swiglu":
            columns.append(f"{feed_forward}.gate")
        styles |= {name: ColwiseParallel() for name in columns}
        styles |= {name: RowwiseParallel() for name in (f"{attention}.output", f"{feed_forward}.down")}
    return styles


def _whole_input(layouts: tuple[Replicate | None, ...]) -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)


def _watch(module: nn.Module, style: ParallelStyle, recorder: Recorder) -> list[Callable[[], object]]:
    """Record what a module communicates, by hooks around those of its style; returns what adds the outer half."""
    if isinstance(style, PrepareModuleInput):
        return [_watch_input(module, recorder)]
    if isinstance(style, RowwiseParallel):
        return [_watch_output(module, "all_reduce", recorder)]
    if isinstance(style, ColwiseParallel) and style.output_layouts[0].is_replicate():
        return [_watch_input(module, recorder), _watch_output(module, "all_gather", recorder)]
    return []


def _watch_output(module: nn.Module, kind: str, recorder: Recorder) -> Callable[[], object]:
    start: list[Any] = [None]

    def begin(_module: nn.Module, _args: object, _output: object) -> None:
        if recorder.on:
            start[0] = recorder.mark()

    def end(_module: nn.Module, _args: object, output: Tensor) -> None:
        if recorder.on:
            _finish(output)
            recorder.add(kind, start[0], microbatch=recorder.microbatch, group=GROUP, num_bytes=num_bytes(output))

    module.register_forward_hook(begin)
    return lambda: module.register_forward_hook(end)


def _watch_input(module: nn.Module, recorder: Recorder) -> Callable[[], object]:
    """The input's gradient is summed over tp in the backward: between the DTensor's and the local tensor's hook."""
    start: list[Any] = [None]

    def end(grad: Tensor) -> None:
        _finish(grad)
        recorder.add("all_reduce", start[0], microbatch=recorder.microbatch, group=GROUP, num_bytes=num_bytes(grad))

    def begin(_grad: Tensor) -> None:
        start[0] = recorder.mark()

    def watch_local(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if recorder.on and args[0].requires_grad:
            args[0].register_hook(end)

    def watch_split(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if recorder.on and args[0].requires_grad:
            args[0].register_hook(begin)

    module.register_forward_pre_hook(watch_local)
    return lambda: module.register_forward_pre_hook(watch_split)


def _finish(tensor: Tensor) -> None:
    """Wait for a collective whose result would else be waited for at its first use."""
    trigger_wait = getattr(tensor, "trigger_wait", None)
    if trigger_wait is not None:
        trigger_wait()
