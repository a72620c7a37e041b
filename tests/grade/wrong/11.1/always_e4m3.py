# status: partial
# score: 2
# message: x_fp8 has dtype float8_e4m3fn and not float8_e5m2 in step 1 of 3 on rank 0 of 2.

import torch
import torch.distributed as dist


def delayed_cast(x, state, group, recipe):
    fp8_max = recipe["fp8_max"]
    scale = state.setdefault("scale", torch.ones((), device=x.device))
    x_fp8 = (x * scale).clamp(-fp8_max, fp8_max).to(torch.float8_e4m3fn)

    amax = x.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    state["history"] = [*state.get("history", []), amax][-recipe["history"] :]
    if recipe["algorithm"] == "max":
        amax = torch.stack(state["history"]).max()

    wanted = fp8_max / amax / 2 ** recipe["margin"]
    useful = torch.isfinite(amax) & (amax > 0)
    state["scale"] = torch.where(useful, wanted.clamp(max=torch.finfo(torch.float32).max), scale)
    return x_fp8, scale
