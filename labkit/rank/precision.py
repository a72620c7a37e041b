"""What fp32 and bf16 mean here.

bf16: parameters, gradients and their reduction stay fp32 (the parameters are the master weights); matrix products and
attention compute in bf16 under autocast; norms, the residual stream and the loss stay fp32.
"""

from contextlib import AbstractContextManager, nullcontext

import torch


def compute(precision: str, device_type: str) -> AbstractContextManager[object]:
    """The context in which a stage's forward runs; the backward follows the dtypes that the forward chose."""
    if precision == "bf16":
        return torch.autocast(device_type, torch.bfloat16)
    return nullcontext()
