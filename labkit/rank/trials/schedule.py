"""Trials of a pipeline schedule that was written as text: it is taken as data, and torch's own runtime runs it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from labkit.errors import PlanError
from labkit.rank.trials.attempt import as_plain, device
from labkit.schedule import check_order, read

__all__ = ["emit", "execute", "inputs", "weights"]

WIDTH = 3
SAMPLES = 2
MAX_ACTIONS = 4_000
MAX_TEXT = 40


def emit(
    answers: Mapping[str, Callable[..., Any]], group: dist.ProcessGroup, *, sizes: list[list[int]]
) -> list[dict[str, Any]]:
    """Ask the answer for its schedule of each (stages, micro-batches).

    Runs on: every member. Communicates: nothing.
    """
    (answer,) = answers.values()
    return [as_lists(answer(num_stages, num_microbatches)) for num_stages, num_microbatches in sizes]


def execute(
    answers: Mapping[str, Callable[..., Any]], group: dist.ProcessGroup, *, num_microbatches: int, seed: int
) -> dict[str, Any]:
    """Have torch's pipelining run the answer's schedule, one stage on each member, on a chain of linear layers.

    Runs on: every member. Communicates: rank 0's schedule to all, then what the schedule asks for. A schedule that
    is none runs nowhere: torch would wait for ever.

    Returns:
        The schedule as plain data; what this member ran, the most micro-batches whose activations it held, the loss
        (of the last stage) and the gradient of its weight.
    """
    (answer,) = answers.values()
    told = [as_lists(answer(dist.get_world_size(group), num_microbatches))]
    # Members that ran different schedules would wait for each other.
    dist.broadcast_object_list(told, group=group, group_src=0)
    lists = told[0].get("lists")
    if lists is None:
        return told[0]
    try:
        actions = read(lists, dist.get_world_size(group), num_microbatches)
        check_order(actions)
    except PlanError:
        return told[0]
    if any(action.kind not in ("F", "B") for line in actions for action in line):
        return told[0]
    return told[0] | _run(lists, group, num_microbatches, seed)


def as_lists(value: Any) -> dict[str, Any]:
    """A schedule as plain data under "lists", or under "refused" what it is instead of lists (or tuples) of text."""
    if value is None:
        return {"refused": "the function returned None, not a list of lists: is there a return at its end?"}
    if type(value) not in (list, tuple):
        return {"refused": f"the function returned a {type(value).__name__}, not a list of lists"}
    for place, line in enumerate(value):
        if type(line) not in (list, tuple):
            return {"refused": f"list {place} is a {type(line).__name__}, not a list of texts"}
        for index, text in enumerate(line):
            if type(text) is not str or len(text) > MAX_TEXT:
                what = "a text of over 40 characters" if type(text) is str else f"a {type(text).__name__}"
                return {"refused": f"list {place} holds {what} at place {index}, not a text such as '0F0'"}
    num_actions = sum(map(len, value))
    if num_actions > MAX_ACTIONS:
        return {"refused": f"the lists hold {num_actions} actions, more than {MAX_ACTIONS}"}
    return {"lists": [list(line) for line in value]}


def weights(stage: int, seed: int) -> Tensor:
    """A stage's weight: small whole numbers, so that every order of adding gives the same bits."""
    index = torch.arange(WIDTH * WIDTH, dtype=torch.int64)
    return ((index * 7 + stage * 3 + seed) % 5 - 2).double().view(WIDTH, WIDTH)


def inputs(num_microbatches: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, `[num_microbatches * SAMPLES, WIDTH]` each."""
    index = torch.arange(num_microbatches * SAMPLES * WIDTH, dtype=torch.int64)
    x, target = ((index * 5 + seed) % 7 - 3).double(), ((index * 3 + seed) % 5 - 2).double()
    return x.view(-1, WIDTH), target.view(-1, WIDTH)


class _Stage(PipelineStage):
    """A stage that notes what it runs and how many micro-batches it holds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ran: list[str] = []
        self.most_held = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run a forward; its activations are held until its backward."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        self.ran.append(f"{self.stage_index}F{fwd_chunk_id}")
        self.most_held = max(self.most_held, len(self.fwd_cache))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        """Run a backward."""
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        self.ran.append(f"{self.stage_index}B{bwd_chunk_id}")


def _run(lists: list[list[str]], group: dist.ProcessGroup, num_microbatches: int, seed: int) -> dict[str, Any]:
    index, num_stages, where = dist.get_rank(group), dist.get_world_size(group), device()
    net = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64, device=where)
    with torch.no_grad():
        net.weight.copy_(weights(index, seed))
    shape = torch.empty(SAMPLES, WIDTH, dtype=torch.float64, device="meta")
    stream = shape.clone().requires_grad_()
    stage = _Stage(
        net, index, num_stages, where, input_args=shape if index == 0 else stream, output_args=stream, group=group
    )
    runtime = _PipelineScheduleRuntime([stage], num_microbatches, loss_fn=_loss, scale_grads=False)
    actions = {rank: [_Action.from_str(text) for text in line] for rank, line in enumerate(lists)}
    runtime._prepare_schedule_with_comms(actions)
    x, target = inputs(num_microbatches, seed)
    losses: list[Tensor] = []
    runtime.step(
        *((x.to(where),) if stage.is_first else ()), target=target.to(where) if stage.is_last else None, losses=losses
    )
    return {
        "ran": stage.ran,
        "most_held": stage.most_held,
        "loss": float(sum(each.item() for each in losses)),
        "gradient": as_plain(net.weight.grad).get("values"),
    }


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()
