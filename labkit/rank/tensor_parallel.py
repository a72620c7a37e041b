"""Tensor parallelism of a stage by DTensor (Shoeybi et al. 2019, arXiv 1909.08053).

Query, key, value, gate and up are split by columns; output and down by rows, whose partial sums one all-reduce adds; so
attention and feed-forward each communicate once forward and once backward. The embedding and the head are split by
vocabulary: the embedding's lookups are all-reduced, and the head's logits stay split, as the loss needs no more of them
than three numbers for each token.

Shapes: B micro-batch, S sequence, V vocabulary (whole here; each rank has its share).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.rank.model import Transformer, mean_loss
from labkit.rank.recorder import Recorder, num_bytes

GROUP = "tp"
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


def shard(stage: Transformer, mesh: DeviceMesh, recorder: Recorder, *, sequence: bool = False) -> dict[str, int]:
    """Split a stage's matrices over tp; every rank keeps its part of what it already holds.

    Runs on: the ranks of a tp group. Communicates: nothing now; collectives in every later forward and backward.

    Args:
        stage: the whole stage.
        mesh: the tp axis.
        recorder: gets the collectives.
        sequence: whether the residual stream and the norms are split over the sequence.

    Returns:
        Name of every split parameter -> the dimension it is split along.
    """
    styles = _styles(stage, sequence)
    if sequence:
        stage.sequence_part = (mesh.get_local_rank(), mesh.size())
    modules = dict(stage.named_modules())
    watched = {
        name: style for name, style in styles.items() if name == "head" or not isinstance(style, ColwiseParallel)
    }
    closers = [
        close for name, style in watched.items() for close in _watch(modules[name], style, recorder, mesh.size())
    ]
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


class Loss:
    """Cross-entropy over logits that are split over the vocabulary, by torch's `loss_parallel`.

    For each token the ranks agree on the largest logit, on the sum of exponentials, and on the target's logit.

    Args:
        mesh: the tp axis.
        recorder: gets the three all-reduces.
    """

    def __init__(self, mesh: DeviceMesh, recorder: Recorder) -> None:
        self._mesh, self._recorder = mesh, recorder

    def __call__(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the micro-batch's mean, whole on every rank.

        Runs on: the ranks of a tp group at once, within `loss_over_shards`, as does the backward.
        Communicates: three all-reduces of one fp32 number for each token.
        """
        split_BSV = DTensor.from_local(logits_BSV, self._mesh, [Shard(2)], run_check=False)
        with _AllReduces(self._recorder) if self._recorder.on else nullcontext():
            loss: DTensor = mean_loss(split_BSV, targets_BS)  # type: ignore[assignment]
        return loss.to_local()


@contextmanager
def loss_over_shards(tp: int) -> Iterator[None]:
    """Within it, where the vocabulary is split, DTensors compute cross-entropy and its gradient over their shards."""
    context = loss_parallel() if tp > 1 else nullcontext()
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)  # told of an exception, torch's would leave everything switched on


class _AllReduces(TorchDispatchMode):  # type: ignore[misc]
    """Records the all-reduces that DTensors make within it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let DTensors take their turn first: what they do inside comes here again."""
        if DTensor in types:
            return NotImplemented
        start = self._recorder.mark() if func is _ALL_REDUCE else None
        result = func(*args, **(kwargs or {}))
        if func is _ALL_REDUCE:
            torch.ops._c10d_functional.wait_tensor(result)
            _add(self._recorder, "all_reduce", start, num_bytes(result))
        return result


def _styles(stage: Transformer, sequence: bool) -> dict[str, ParallelStyle]:
    stream = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {}
    if stage.embedding is not None:
        styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if stage.head is not None:
        styles["head"] = ColwiseParallel(input_layouts=stream)
    if sequence:
        styles |= {name: SequenceParallel(use_local_output=True) for name in _norms(stage)}
        if stage.positions is not None:
            styles["positions"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    for index in stage.layers:
        attention, feed_forward = f"layers.{index}.attention", f"layers.{index}.feed_forward"
        # One DTensor for all columns: their gradients add up before the one collective.
        styles[attention] = _whole_input(stream, 1)
        styles[feed_forward] = _whole_input(stream, 0)
        columns = [f"{attention}.{name}" for name in ("query", "key", "value")] + [f"{feed_forward}.up"]
        if stage.model.activation == "swiglu":
            columns.append(f"{feed_forward}.gate")
        styles |= {name: ColwiseParallel() for name in columns}
        rows = (f"{attention}.output", f"{feed_forward}.down")
        styles |= {name: RowwiseParallel(output_layouts=stream) for name in rows}
    return styles


def _norms(stage: Transformer) -> list[str]:
    names = [f"layers.{index}.{part}_norm" for index in stage.layers for part in ("attention", "feed_forward")]
    return [*names, "norm"] if stage.norm is not None else names


def _whole_input(stream: Placement, num_others: int) -> PrepareModuleInput:
    """A module that takes the stream whole, and then inputs that are no part of it."""
    others = (None,) * num_others
    return PrepareModuleInput(input_layouts=(stream, *others), desired_input_layouts=(Replicate(), *others))


def _watch(module: nn.Module, style: ParallelStyle, recorder: Recorder, size: int) -> list[Callable[[], object]]:
    """Record what a module communicates, by hooks around those of its style; returns what adds the outer half."""
    if isinstance(style, PrepareModuleInput):
        return [_watch_input(module, recorder, size, split=_is_split((style.input_layouts or (None,))[0]))]
    if isinstance(style, RowwiseParallel):
        return [_watch_output(module, recorder, size, split=_is_split(style.output_layouts[0]))]
    if isinstance(style, ColwiseParallel):
        return [_watch_input(module, recorder, size, split=_is_split(style.input_layouts[0]))]
    return []


def _is_split(layout: Placement | None) -> bool:
    return layout is not None and layout.is_shard()


def _watch_output(module: nn.Module, recorder: Recorder, size: int, *, split: bool) -> Callable[[], object]:
    """Parts of a sum become the sum; where the stream is split, each rank's part of it, and back by a gather."""
    start: list[Any] = [None]

    def begin(_module: nn.Module, _args: object, output: Tensor) -> None:
        if recorder.on:
            start[0] = recorder.mark()
            if split and output.requires_grad:
                output.register_hook(lambda grad: gathered(grad))

    def end(_module: nn.Module, _args: object, output: Tensor) -> None:
        if recorder.on:
            _finish(output)
            name, times = ("reduce_scatter", size) if split else ("all_reduce", 1)
            _add(recorder, name, start[0], times * num_bytes(output))
            if split and output.requires_grad:
                output.register_hook(lambda _: start.__setitem__(0, recorder.mark()))

    def gathered(grad: Tensor) -> None:
        _finish(grad)
        _add(recorder, "all_gather", start[0], num_bytes(grad))

    module.register_forward_hook(begin)
    return lambda: module.register_forward_hook(end)


def _watch_input(module: nn.Module, recorder: Recorder, size: int, *, split: bool) -> Callable[[], object]:
    """The input's gradient is summed over tp in the backward: between the DTensor's and the local tensor's hook.

    Where the stream is split it is gathered in the forward, and the sum is scattered.
    """
    start: list[Any] = [None]

    def end(grad: Tensor) -> None:
        _finish(grad)
        name, times = ("reduce_scatter", size) if split else ("all_reduce", 1)
        _add(recorder, name, start[0], times * num_bytes(grad))

    def begin(_grad: Tensor) -> None:
        start[0] = recorder.mark()

    def watch_local(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if recorder.on:
            start[0] = recorder.mark()
            if args[0].requires_grad:
                args[0].register_hook(end)

    def watch_whole(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if not recorder.on:
            return
        if split:
            _finish(args[0])
            _add(recorder, "all_gather", start[0], num_bytes(args[0]))
        if args[0].requires_grad:
            args[0].register_hook(begin)

    module.register_forward_pre_hook(watch_local)
    return lambda: module.register_forward_pre_hook(watch_whole)


def _add(recorder: Recorder, kind: str, start: Any, size: int) -> None:
    recorder.add(kind, start, microbatch=recorder.microbatch, group=GROUP, num_bytes=size)


def _finish(tensor: Tensor) -> None:
    """Wait for a collective whose result would else be waited for at its first use."""
    trigger_wait = getattr(tensor, "trigger_wait", None)
    if trigger_wait is not None:
        trigger_wait()
