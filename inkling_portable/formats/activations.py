"""Activations as a low-precision kernel sees them: quantised and dequantised in one step."""

from __future__ import annotations

import torch
from torch import Tensor

from inkling_portable.formats.codes import (
    E2M1_POSITIVE,
    E4M3_MAX,
    E4M3_POSITIVE,
    decode_e8m0,
    snap,
    split_blocks,
    working,
)
from inkling_portable.formats.mxfp4 import MXFP4_BLOCK, mx_exponent
from inkling_portable.formats.nvfp4 import NVFP4_BLOCK, nvfp4_block_scale

ACTIVATION_FORMATS = ("bf16", "fp8", "nvfp4", "mxfp4")


def fake_quantize(x: Tensor, act: str, global_scale: Tensor | None = None) -> Tensor:
    """x [..., C] as kernels with `act` activations see it: quantised, dequantised, in x's dtype.

    "bf16"  x itself (16-bit activations are whatever the model computes in);
    "fp8"   E4M3 with one scale per row, amax / 448;
    "nvfp4" E2M1 with an E4M3 scale per 16 and `global_scale` (a number, amax / 2688 of the
            calibration; 1 where the checkpoint has none, so that rows stay independent);
    "mxfp4" E2M1 with a power-of-two scale per 32, rule "even" (see `quantize_mxfp4`).
    NaN or infinity makes its own row or block NaN and no other: padding rows may hold it.
    """
    if act not in ACTIVATION_FORMATS:
        raise ValueError(
            f"unknown activation format {act!r}; use one of {', '.join(ACTIVATION_FORMATS)}"
        )
    if act == "bf16":
        return x
    work = working(x)
    if act == "fp8":
        amax = work.abs().amax(-1, keepdim=True) / E4M3_MAX
        scale = torch.where(amax == 0, torch.ones_like(amax), amax)
        return (snap(work / scale, E4M3_POSITIVE) * scale).to(x.dtype)
    blocks = split_blocks(work, NVFP4_BLOCK if act == "nvfp4" else MXFP4_BLOCK)
    factor = torch.ones((), dtype=work.dtype, device=work.device)
    if act == "nvfp4":
        factor = factor if global_scale is None else global_scale.to(work.dtype).reshape(())
        scale = nvfp4_block_scale(blocks, factor)[..., None]
    else:
        power = mx_exponent(torch.nan_to_num(blocks), "even")
        scale = decode_e8m0((power + 127).to(torch.uint8), work.dtype)[..., None]
    seen = snap(blocks / (scale * factor), E2M1_POSITIVE) * scale * factor
    usable = blocks.isfinite().all(-1, keepdim=True)
    return torch.where(usable, seen, torch.nan).flatten(-2).to(x.dtype)
