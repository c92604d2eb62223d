"""FP8 weights: E4M3 with a scale per output channel or per tile, and their e4m3fnuz form."""

from __future__ import annotations

import torch
from torch import Tensor

from inkling_portable.formats.codes import E4M3_MAX, as_codes, decode_e4m3, encode_e4m3, finite


def check_fp8(weight: Tensor, scale: Tensor, name: str = "FP8 weight") -> None:
    """Refuse, with a ValueError that starts with `name`, an FP8 weight with NaN or a bad scale."""
    nan = decode_e4m3(weight, fnuz=weight.dtype == torch.float8_e4m3fnuz).isnan()
    if nan.any():
        raise ValueError(f"{name}: a weight is NaN; the checkpoint is damaged; fetch it again")
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise ValueError(
            f"{name}: every scale must be positive and finite; found "
            f"{scale.float().min().item():g} to {scale.float().max().item():g}; "
            f"quantise the weight again"
        )


def quantize_fp8_channel(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., R, C] -> (float8_e4m3fn [..., R, C], scale fp32 [..., R, 1] = row amax / 448).

    A row of zeros gets scale 1.
    """
    work = finite(w)
    amax = work.abs().amax(-1, keepdim=True) / E4M3_MAX
    chosen = amax.clamp(min=torch.finfo(torch.float32).tiny).float()
    scale = torch.where(amax > 0, chosen, torch.ones_like(chosen))
    return encode_e4m3(work / scale.to(work.dtype)), scale


def dequantize_fp8(
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    block: tuple[int, int] | None = None,
    check: bool = True,
    name: str = "FP8 weight",
) -> Tensor:
    """[..., R, C] of `dtype` from E4M3 codes (float8_e4m3fn, float8_e4m3fnuz, or uint8 read as fn).

    scale [..., R, 1] or one number; with `block` = (rows, columns) it is [..., ceil(R / rows),
    ceil(C / columns)] and each number covers one tile.
    """
    rows, columns = weight.shape[-2:]
    if block is None:
        wanted = (*weight.shape[:-1], 1)
        fits = scale.numel() == 1 or tuple(scale.shape) == wanted
    else:
        wanted = (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        fits = tuple(scale.shape) == wanted
    if not fits:
        raise ValueError(
            f"{name}: FP8 scales need shape {list(wanted)}; found {list(scale.shape)}; "
            f"check that weight and scale belong together"
        )
    if check:
        check_fp8(weight, scale, name)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    factor = scale.to(work)
    if block is None:
        factor = factor.reshape(()) if factor.numel() == 1 else factor
    else:
        tall = factor.repeat_interleave(block[0], dim=-2)[..., :rows, :]
        factor = tall.repeat_interleave(block[1], dim=-1)[..., :columns]
    values = decode_e4m3(weight, work, fnuz=weight.dtype == torch.float8_e4m3fnuz)
    return (values * factor).to(dtype)


def fp8_to_fnuz(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same weight for hardware whose FP8 is e4m3fnuz (gfx942): (codes, 2 * scale).

    A code means half as much there, and minus zero would be NaN; NaN weights are refused.
    """
    check_fp8(weight, scale, "fp8_to_fnuz")
    codes = as_codes(weight)
    codes = torch.where(codes == 128, torch.zeros_like(codes), codes)
    return codes.view(torch.float8_e4m3fnuz), scale * 2
