# status: partial
# score: 4
# message: the gradient of x is None on rank 0 (member 0 of 2) where a tensor of shape [2, 2] is wanted: the output depends on it on every member, and what communicates must say how its gradient goes back, as a torch.autograd.Function does.

import torch
import torch.distributed as dist
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
    with torch.no_grad():
        whole = F.linear(x, weight)
        dist.all_reduce(whole, group=group)
    return whole + bias
