# status: partial
# score: 6
# message: the gradient of bias is None on rank 1 (member 1 of 2) where a tensor of shape [3] is wanted: the output depends on it on every member, and what communicates must say how its gradient goes back, as a torch.autograd.Function does.

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
    first = dist.get_rank(group) == 0
    return FromMembers.apply(F.linear(x, weight, bias if first else None), group)
