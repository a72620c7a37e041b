# status: wrong
# score: 0
# message: number 2 of 6 is 448 and not 256 in step 2 of 3 on rank 0 of 2: x is 2.21648, the scale 112; the scale is in it twice.

import torch
import torch.distributed as dist


def delayed_cast(x, state, group, recipe):
    fp8_max = recipe["fp8_max"]
    scale = state.setdefault("scale", torch.ones((), device=x.device))
    scaled = (x * scale).clamp(-fp8_max, fp8_max)
    x_fp8 = (scaled * scale).clamp(-fp8_max, fp8_max).to(recipe["dtype"])

    amax = x.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    state["history"] = [*state.get("history", []), amax][-recipe["history"] :]
    if recipe["algorithm"] == "max":
        amax = torch.stack(state["history"]).max()

    wanted = fp8_max / amax / 2 ** recipe["margin"]
    useful = torch.isfinite(amax) & (amax > 0)
    state["scale"] = torch.where(useful, wanted.clamp(max=torch.finfo(torch.float32).max), scale)
    return x_fp8, scale
