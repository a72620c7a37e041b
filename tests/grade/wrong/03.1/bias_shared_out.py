# status: partial
# score: 5
# message: the gradient of bias at [1] is -1 on rank 0 (member 0 of 2) where -2 is wanted: it is 1/2 of that, so each of the 2 members added 1/2 of bias.

import torch
import torch.distributed as dist
import torch.nn.functional as F


class FromMembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        whole = partial.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ToMembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def column_parallel(x, weight, bias, group):
    return F.linear(ToMembers.apply(x, group), weight, bias)


def row_parallel(x, weight, bias, group):
    return FromMembers.apply(F.linear(x, weight, bias / dist.get_world_size(group)), group)
