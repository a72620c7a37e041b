# status: partial
# score: 5
# message: the output of column_parallel has shape [2, 4] on rank 0 (member 0 of 2) where [2, 2] is wanted: a member returns its own columns alone, and nothing is gathered.

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


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        parts = grad.chunk(dist.get_world_size(ctx.group), dim=1)
        return parts[dist.get_rank(ctx.group)].contiguous(), None


class Gathered(torch.autograd.Function):
    """This member's columns; backward, the members' gradients are put together again."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, dim=1), None


def column_parallel(x, weight, bias, group):
    return Gather.apply(F.linear(ToMembers.apply(x, group), weight, bias), group)


def row_parallel(x, weight, bias, group):
    if x.shape[1] != weight.shape[1]:
        x = Gathered.apply(x, group)
    return FromMembers.apply(F.linear(x, weight), group) + bias
