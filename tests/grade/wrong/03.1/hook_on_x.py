# status: partial
# score: 8
# message: the gradient of x at [0, 0] is -20 on rank 3 (member 0 of 3) where -12 is wanted: the gradient that came past both layers was summed over the 3 members too, and it was whole already.

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


def column_parallel(x, weight, bias, group):
    def add_up(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    if x.requires_grad:
        x.register_hook(add_up)  # also sees what reaches x on other ways
    return F.linear(x, weight, bias)


def row_parallel(x, weight, bias, group):
    return FromMembers.apply(F.linear(x, weight), group) + bias
