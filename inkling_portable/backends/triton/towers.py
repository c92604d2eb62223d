"""Tower ops: norm with GELU for images, lookup with norm for audio; one program a row.

A tower norm rounds twice, when normalised and when scaled, as its contract says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton._common import check_rows, options, pdl, row_block


@triton.jit
def _two_step(wide, gain, H: tl.constexpr, eps, dtype: tl.constexpr):
    """wide float32 [BLOCK], zero past H; gain in `dtype` -> the norm, rounded twice, float32."""
    normal = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)).to(dtype).to(tl.float32)
    return (normal * gain.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _norm_gelu_kernel(
    x, weight, out, x_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    gain = tl.load(weight + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    y = _two_step(value.to(tl.float32), gain, H, eps, x.dtype.element_ty)
    tl.store(out + row * H + column, 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476)), mask=inside)


def norm_gelu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the contract."""
    check_rows("norm_gelu", x=x, weight=weight)
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        block, warps = row_block("norm_gelu", width)
        _norm_gelu_kernel[(rows,)](x, weight, out, x.stride(0), eps, H=width, BLOCK=block,
                                   PDL=pdl(), **options(num_warps=warps))  # fmt: skip
    return out


@triton.jit
def _dmel_kernel(
    bins,
    table,
    weight,
    out,
    bins_stride,
    table_stride,
    eps,
    MEL: tl.constexpr,
    LEVELS: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums table rows bin by bin in float32, so that memory does not grow with the bins."""
    frame = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    gain = tl.load(weight + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for m in range(MEL):
        level = tl.load(bins + frame * bins_stride + m).to(tl.int64)
        width = tl.where((level >= 0) & (level < LEVELS), H, 0)
        place = table + (m * LEVELS + level) * table_stride + column
        total += tl.load(place, mask=column < width, other=0.0).to(tl.float32)
    rounded = total.to(table.dtype.element_ty).to(tl.float32)
    tl.store(
        out + frame * H + column, _two_step(rounded, gain, H, eps, table.dtype.element_ty), inside
    )


def dmel_embed_norm(bins: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the contract. A level outside [0, L) adds nothing."""
    check_rows("dmel_embed_norm", bins=bins, table=table, weight=weight)
    (frames, mel), width = bins.shape, table.shape[1]
    out = torch.empty(frames, width, dtype=table.dtype, device=table.device)
    if frames:
        block, warps = row_block("dmel_embed_norm", width)
        _dmel_kernel[(frames,)](
            bins,
            table,
            weight,
            out,
            bins.stride(0),
            table.stride(0),
            eps,
            MEL=mel,
            LEVELS=table.shape[0] // mel,
            H=width,
            BLOCK=block,
            PDL=pdl(),
            **options(num_warps=warps),
        )
    return out
