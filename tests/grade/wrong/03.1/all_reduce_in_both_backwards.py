# status: partial
# score: 4
# message: the gradient of x at [0, 0] is 8 on rank 0 (member 0 of 2) where 4 is wanted: it is 2 times as large, so 2 equal gradients were added where each member has the whole one already.

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F


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
    # Its backward is an all_reduce too.
    return functional_collectives.all_reduce(F.linear(x, weight), "sum", group) + bias
