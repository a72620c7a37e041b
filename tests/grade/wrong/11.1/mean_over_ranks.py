# status: partial
# score: 8
# message: the scale is 318.578 and not 149.333 in step 2 of 3 on rank 0 of 4: this is from the mean of the ranks' amaxes, and the group's is the largest of them.

import torch
import torch.distributed as dist


def delayed_cast(x, state, group, recipe):
    fp8_max = recipe["fp8_max"]
    scale = state.setdefault("scale", torch.ones((), device=x.device))
    x_fp8 = (x * scale).clamp(-fp8_max, fp8_max).to(recipe["dtype"])

    amax = x.abs().max()
    dist.all_reduce(amax, group=group)
    amax /= dist.get_world_size(group)
    state["history"] = [*state.get("history", []), amax][-recipe["history"] :]
    if recipe["algorithm"] == "max":
        amax = torch.stack(state["history"]).max()

    wanted = fp8_max / amax / 2 ** recipe["margin"]
    useful = torch.isfinite(amax) & (amax > 0)
    state["scale"] = torch.where(useful, wanted.clamp(max=torch.finfo(torch.float32).max), scale)
    return x_fp8, scale
