# status: partial
# score: 8
# message: the two layers made 1 all_gather forward on rank 0 (member 0 of 4) where exactly 1 all_reduce is wanted: a member's columns of the first layer are its inputs of the second, so one sum at the end is enough.

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


class GatherAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        parts = [torch.empty_like(partial) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, partial, group=group)
        return sum(parts)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def row_parallel(x, weight, bias, group):
    return GatherAdd.apply(F.linear(x, weight), group) + bias
