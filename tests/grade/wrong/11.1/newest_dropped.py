# status: partial
# score: 8
# message: the scale is 448 and not 8.96 in step 4 of 7 on rank 0 of 2: this is from the rule 'most_recent', and the recipe says 'max'.

import torch
import torch.distributed as dist


def delayed_cast(x, state, group, recipe):
    fp8_max = recipe["fp8_max"]
    scale = state.setdefault("scale", torch.ones((), device=x.device))
    x_fp8 = (x * scale).clamp(-fp8_max, fp8_max).to(recipe["dtype"])

    amax = x.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    history = state.setdefault("history", torch.zeros(recipe["history"], device=x.device))
    history[0] = amax
    if recipe["algorithm"] == "max":
        amax = history.max()
    # Rolled so that the newest is at the end; then the end is cleared for the next one, which goes to the beginning.
    history.copy_(history.roll(-1))
    history[-1] = 0

    wanted = fp8_max / amax / 2 ** recipe["margin"]
    useful = torch.isfinite(amax) & (amax > 0)
    state["scale"] = torch.where(useful, wanted.clamp(max=torch.finfo(torch.float32).max), scale)
    return x_fp8, scale
