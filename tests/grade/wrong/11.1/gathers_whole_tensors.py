# status: partial
# score: 8
# message: a rank of 4 sends 256 B in a step, and 32 B are enough: the group needs one amax.

import torch
import torch.distributed as dist


def delayed_cast(x, state, group, recipe):
    fp8_max = recipe["fp8_max"]
    scale = state.setdefault("scale", torch.ones((), device=x.device))
    x_fp8 = (x * scale).clamp(-fp8_max, fp8_max).to(recipe["dtype"])

    everybody = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, x, group=group)
    amax = torch.stack(everybody).abs().max()
    state["history"] = [*state.get("history", []), amax][-recipe["history"] :]
    if recipe["algorithm"] == "max":
        amax = torch.stack(state["history"]).max()

    wanted = fp8_max / amax / 2 ** recipe["margin"]
    useful = torch.isfinite(amax) & (amax > 0)
    state["scale"] = torch.where(useful, wanted.clamp(max=torch.finfo(torch.float32).max), scale)
    return x_fp8, scale
