"""MXFP4: E2M1 in blocks of 32 with a power-of-two E8M0 scale."""

from __future__ import annotations

import torch
from torch import Tensor

from inkling_portable.formats.codes import (
    as_codes,
    decode_e8m0,
    decode_packed,
    e2m1_codes,
    finite,
    pack_e2m1,
    shaped_scale,
    split_blocks,
)

MXFP4_BLOCK = 32
MX_SCALE_RULES = ("even", "floor", "ceil")


def check_mxfp4(packed: Tensor, scale: Tensor, name: str = "MXFP4 weight") -> None:
    """Refuse, with a ValueError that starts with `name`, tensors that cannot be an MXFP4 weight.

    packed uint8 [..., R, C/2] · scale E8M0 [..., R, C/32] or flattened [rows, C/32].
    """
    shaped_scale(packed, scale, MXFP4_BLOCK, name)
    if (as_codes(scale) == 255).any():
        raise ValueError(
            f"{name}: a block scale has E8M0 code 255, which is NaN; the checkpoint is damaged; "
            f"fetch it again"
        )


def mx_exponent(blocks: Tensor, rule: str) -> Tensor:
    """Power of two, int32 in -127..127, that divides blocks [..., n, 32]."""
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1))  # amax = mantissa * 2^exponent
    if rule == "floor":
        power = exponent - 3
    elif rule == "even":
        power = exponent - 3 + (mantissa >= 0.875).int()
    elif rule == "ceil":
        power = exponent - 3 + (mantissa > 0.75).int()
    else:
        raise ValueError(f"unknown MX scale rule {rule!r}; use one of {', '.join(MX_SCALE_RULES)}")
    return torch.where(mantissa == 0, -127, power).clamp(-127, 127)


def quantize_mxfp4(w: Tensor, rule: str = "even") -> tuple[Tensor, Tensor]:
    """w [..., C] -> (packed uint8 [..., C/2], scale codes uint8 E8M0 [..., C/32]).

    The scale is a power of two chosen by `rule` from the block's amax:
    "even"  2^(floor(log2(amax rounded to two significand bits)) - 2): AMD Quark's default, and what
            compressed-tensors does; at most 7 / 6 is cut off the largest value;
    "floor" 2^(floor(log2 amax) - 2): the OCP MX 1.0 text; up to 8 / 6 is cut off;
    "ceil"  the smallest power of two with amax <= 6 * scale: nothing saturates.
    A zero block gets code 0.
    """
    blocks = split_blocks(finite(w), MXFP4_BLOCK)
    codes = (mx_exponent(blocks, rule) + 127).to(torch.uint8)
    scale = decode_e8m0(codes, blocks.dtype)[..., None]
    return pack_e2m1(e2m1_codes(blocks / scale).flatten(-2)), codes


def dequantize_mxfp4(
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    check: bool = True,
    name: str = "MXFP4 weight",
) -> Tensor:
    """[..., R, C] of `dtype` from the tensors described in `check_mxfp4`.

    Exact in fp64; in fp32 too, but for products above its range (code 254), which are infinite.
    """
    if check:
        check_mxfp4(packed, scale, name)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    scales = decode_e8m0(shaped_scale(packed, scale, MXFP4_BLOCK, name), work)
    values = split_blocks(decode_packed(packed, work), MXFP4_BLOCK) * scales[..., None]
    return values.flatten(-2).to(dtype)
