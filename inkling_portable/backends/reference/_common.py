"""What all references share: where they accumulate, where they round, and the norm."""

import torch
from torch import Tensor


def acc(x: Tensor) -> Tensor:
    """`x` in the precision in which sums are formed: float64 stays, everything else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def store(x: Tensor, like: Tensor) -> Tensor:
    """Round to the storage dtype of `like`: the places where the model keeps a value in memory."""
    return x.to(like.dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of the last axis with one rounding, in the dtype of `x`."""
    wide = acc(x)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return store(scaled * acc(weight).to(wide.dtype), x)
