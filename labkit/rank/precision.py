"""What fp32, bf16 and fp8 mean here.

bf16: parameters, gradients and their reduction stay fp32 (the parameters are the master weights); matrix products and
attention compute in bf16 under autocast; norms, the residual stream and the loss stay fp32.

fp8: as bf16, and the matrices of attention and feed-forward multiply in FP8, forward and backward.
"""

from contextlib import AbstractContextManager, nullcontext

import torch


def compute(precision: str, device_type: str) -> AbstractContextManager[object]:
    """The context in which a stage's forward runs; the backward follows the dtypes that the forward chose."""
    if precision in ("bf16", "fp8"):
        return torch.autocast(device_type, torch.bfloat16)
    return nullcontext()
