# status: partial
# score: 2
# message: number 0 of 6 is inf and not 57344 in step 2 of 3 on rank 0 of 2: x is 42.6869, the scale 114688; what is beyond 57344 becomes 57344.

import torch
import torch.distributed as dist


def delayed_cast(x, state, group, recipe):
    fp8_max = recipe["fp8_max"]
    scale = state.setdefault("scale", torch.ones((), device=x.device))
    x_fp8 = (x * scale).to(recipe["dtype"])

    amax = x.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    state["history"] = [*state.get("history", []), amax][-recipe["history"] :]
    if recipe["algorithm"] == "max":
        amax = torch.stack(state["history"]).max()

    wanted = fp8_max / amax / 2 ** recipe["margin"]
    useful = torch.isfinite(amax) & (amax > 0)
    state["scale"] = torch.where(useful, wanted.clamp(max=torch.finfo(torch.float32).max), scale)
    return x_fp8, scale
