"""Tensors between guard regions: a kernel that reads or writes beyond its arguments is seen."""

from typing import Any

import torch

GUARD = 256
"""Elements before and after a tensor: NaN, or an integer no index may have."""
BAD_INTEGER = -(2**30)


def guarded(value: Any) -> Any:
    """A copy of a tensor, same shape and strides, between guards; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    strides = value.stride()
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, strides, strict=True))
    extent = extent if value.numel() else 0
    bad = float("nan") if value.dtype.is_floating_point else BAD_INTEGER
    buffer = torch.full((extent + 2 * GUARD,), bad, dtype=value.dtype, device=value.device)
    copy = buffer.as_strided(value.shape, strides, GUARD)
    copy.copy_(value)
    return copy


def broken_guards(arguments: dict[str, Any]) -> list[str]:
    """Names of tensors made by `guarded` whose guards were written."""
    broken = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            whole = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),),
                                     (1,), 0)  # fmt: skip
            edges = torch.cat([whole[:GUARD], whole[-GUARD:]])
            bad = edges.isnan() if value.dtype.is_floating_point else edges == BAD_INTEGER
            if not bool(bad.all()):
                broken.append(name)
    return broken
