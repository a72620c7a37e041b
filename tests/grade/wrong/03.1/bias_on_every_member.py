# status: partial
# score: 5
# message: the output of row_parallel at [0, 0] is 25 on rank 0 (member 0 of 2) where 22 is wanted: bias was added 2 times, by each member before the sum: add it once, after it.

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
    return FromMembers.apply(F.linear(x, weight, bias), group)
