"""NVFP4: E2M1 in blocks of 16 with an E4M3 scale, and an fp32 global scale per matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from inkling_portable.formats.codes import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_POSITIVE,
    as_codes,
    decode_e4m3,
    decode_packed,
    e2m1_codes,
    encode_e4m3,
    finite,
    pack_e2m1,
    shaped_scale,
    snap,
    split_blocks,
)

NVFP4_BLOCK = 16
E4M3_SMALLEST = 2.0**-9


def row_factor(global_scale: Tensor, rows: torch.Size, name: str) -> Tensor:
    """A global scale (one number, one per expert or one per row) broadcastable to `rows`."""
    if global_scale.numel() == 1:
        return global_scale.reshape(())
    shape = tuple(global_scale.shape)
    padded = shape + (1,) * (len(rows) - len(shape))
    fits = len(padded) == len(rows) and all(
        have in (1, want) for have, want in zip(padded, rows, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: a global scale needs one number, one per expert or one per row of "
            f"{list(rows)}; found shape {list(shape)}; expand halves with `row_global_scale`"
        )
    return global_scale.reshape(padded)


def check_nvfp4(
    packed: Tensor, scale: Tensor, global_scale: Tensor, name: str = "NVFP4 weight"
) -> None:
    """Refuse, with a ValueError that starts with `name`, tensors that cannot be an NVFP4 weight.

    packed uint8 [..., R, C/2] · scale E4M3 [..., R, C/16] · global_scale [] or [...] or [..., R].
    """
    shaped_scale(packed, scale, NVFP4_BLOCK, name)
    row_factor(global_scale, packed.shape[:-1], name)
    if ((as_codes(scale) & 127) == 127).any():
        raise ValueError(f"{name}: a block scale is NaN; the checkpoint is damaged; fetch it again")
    if not (torch.isfinite(global_scale) & (global_scale > 0)).all():
        raise ValueError(
            f"{name}: a global scale must be positive and finite; found "
            f"{global_scale.float().min().item():g} to {global_scale.float().max().item():g}; "
            f"quantise the weight again"
        )


def nvfp4_block_scale(blocks: Tensor, global_scale: Tensor) -> Tensor:
    """E4M3 value of amax / 6 / global for blocks [..., n, 16]; never zero, so it can divide."""
    ideal = blocks.abs().amax(-1) / E2M1_MAX / global_scale
    return snap(ideal.clamp(min=E4M3_SMALLEST), E4M3_POSITIVE)


def quantize_nvfp4(w: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """w [..., R, C] -> (packed uint8 [..., R, C/2], scale E4M3 [..., R, C/16], global fp32 [...]).

    w = E2M1 * scale * global, as ModelOpt stores it (compressed-tensors stores 1 / global). Without
    `global_scale` each leading matrix gets amax / 2688, so that its largest block scale is 448.
    A block too small for the smallest E4M3 number, or all zero, gets that number.
    """
    work = finite(w)
    blocks = split_blocks(work, NVFP4_BLOCK)
    if global_scale is None:
        amax = work.abs().amax((-2, -1)) / (E2M1_MAX * E4M3_MAX)
        chosen = amax.clamp(min=torch.finfo(torch.float32).tiny).float()
        global_scale = torch.where(amax > 0, chosen, torch.ones_like(chosen))
    factor = row_factor(global_scale, w.shape[:-1], "quantize_nvfp4").to(work.dtype)[..., None]
    scale = nvfp4_block_scale(blocks, factor)
    packed = pack_e2m1(e2m1_codes(blocks / (scale * factor)[..., None]).flatten(-2))
    # The global scale is checked with the rest: zero or NaN would only show as saturated codes.
    stored = scale.to(torch.float8_e4m3fn)
    check_nvfp4(packed, stored, global_scale, "quantize_nvfp4")
    return packed, stored, global_scale


def dequantize_nvfp4(
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    reciprocal: bool = False,
    check: bool = True,
    name: str = "NVFP4 weight",
) -> Tensor:
    """[..., R, C] of `dtype` from the tensors described in `check_nvfp4`.

    `reciprocal` divides by the global scale (compressed-tensors) instead of multiplying (ModelOpt).
    fp64 is exact when multiplying; fp32 is rounded once. `check=False` skips reading the values.
    """
    if check:
        check_nvfp4(packed, scale, global_scale, name)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    scales = decode_e4m3(shaped_scale(packed, scale, NVFP4_BLOCK, name), work)
    factor = row_factor(global_scale, packed.shape[:-1], name).to(work)[..., None, None]
    values = split_blocks(decode_packed(packed, work), NVFP4_BLOCK) * scales[..., None]
    return (values / factor if reciprocal else values * factor).flatten(-2).to(dtype)


def row_global_scale(halves: Tensor, rows: int, *, interleaved: bool) -> Tensor:
    """[E, 2] global scales of gate and up -> [E, rows], one per row of the fused weight.

    `interleaved`: rows alternate gate, up; otherwise all gate rows come first.
    """
    if halves.dim() != 2 or halves.shape[1] != 2 or rows % 2:
        raise ValueError(
            f"global scales of two halves need shape [experts, 2] and an even number of rows; "
            f"found {list(halves.shape)} and {rows} rows"
        )
    if interleaved:
        return halves.repeat(1, rows // 2)
    return halves.repeat_interleave(rows // 2, dim=1)


def unify_global_scales(
    scale: Tensor, halves: Tensor, *, interleaved: bool, reciprocal: bool = False
) -> tuple[Tensor, Tensor, int]:
    """Give gate and up of each expert one global scale -> (scale, global [E], experts changed).

    scale E4M3 [E, R, C/16] · halves fp32 [E, 2]. The larger factor wins, so block scales only
    shrink and never saturate; each moves to the nearest E4M3 number. The result keeps the
    convention of the input (`reciprocal`: W = E2M1 * scale / global).
    """
    multiplier = halves.double().reciprocal() if reciprocal else halves.double()
    largest = multiplier.amax(1)
    ratio = row_global_scale(multiplier / largest[:, None], scale.shape[1], interleaved=interleaved)
    unified = encode_e4m3(decode_e4m3(scale, torch.float64) * ratio[..., None])
    merged = halves.amin(1) if reciprocal else halves.amax(1)
    return unified, merged, int((halves[:, 0] != halves[:, 1]).sum())
