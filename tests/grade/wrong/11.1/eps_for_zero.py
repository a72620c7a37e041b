# status: partial
# score: 4
# message: the scale is 4.48e+14 and not 1 in step 2 of 4 on rank 0 of 2: the amax before it is 0, and then the scale stays as it was.

import torch
import torch.distributed as dist


def delayed_cast(x, state, group, recipe):
    fp8_max = recipe["fp8_max"]
    scale = state.setdefault("scale", torch.ones((), device=x.device))
    x_fp8 = (x * scale).clamp(-fp8_max, fp8_max).to(recipe["dtype"])

    amax = x.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    state["history"] = [*state.get("history", []), amax][-recipe["history"] :]
    if recipe["algorithm"] == "max":
        amax = torch.stack(state["history"]).max()

    amax = amax.clamp(min=1e-12)
    state["scale"] = fp8_max / amax / 2 ** recipe["margin"]
    return x_fp8, scale
