"""Tower ops: norm with GELU for images, lookup with norm for audio.

A norm has one program a row; a frame's rows of the table are summed by several programs, since one
alone reads far below the memory's rate. A tower norm rounds twice, when normalised and when scaled,
as its contract says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton._common import (
    ceil_div,
    check_rows,
    check_shapes,
    next_power_of_2,
    options,
    pdl,
    row_block,
)


@triton.jit
def _two_step(wide, gain, H: tl.constexpr, eps, dtype: tl.constexpr):
    """wide float32 [BLOCK], zero past H; gain in `dtype` -> the norm, rounded twice, float32."""
    normal = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)).to(dtype).to(tl.float32)
    return (normal * gain.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _norm_gelu_kernel(
    x, weight, out, x_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    gain = tl.load(weight + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    y = _two_step(value.to(tl.float32), gain, H, eps, x.dtype.element_ty)
    if GELU:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    tl.store(out + row * H + column, y, mask=inside)


def _norm(op: str, x: Tensor, weight: Tensor, eps: float, out: Tensor, gelu: bool) -> Tensor:
    """`out`, which may be x, gets the norm of each row; out [T, H] is contiguous."""
    rows, width = x.shape
    if rows:
        block, warps = row_block(op, width)
        _norm_gelu_kernel[(rows,)](x, weight, out, x.stride(0), eps, H=width, BLOCK=block,
                                   GELU=gelu, PDL=pdl(), **options(num_warps=warps))  # fmt: skip
    return out


def norm_gelu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the contract."""
    check_rows("norm_gelu", x=x, weight=weight)
    check_shapes("norm_gelu", "x TH=, weight H=", x, weight)
    return _norm(
        "norm_gelu",
        x,
        weight,
        eps,
        torch.empty_like(x, memory_format=torch.contiguous_format),
        True,
    )


@triton.jit
def _dmel_kernel(
    bins, table, out, bins_stride, table_stride, MEL: tl.constexpr, LEVELS: tl.constexpr,
    H: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums BLOCK columns of a frame's table rows in float32, GROUP rows at a time."""
    frame = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.static_range(0, MEL, GROUP):
        m = first + tl.arange(0, GROUP)
        level = tl.load(bins + frame * bins_stride + m, mask=m < MEL, other=-1).to(tl.int64)
        width = tl.where((level >= 0) & (level < LEVELS), H, 0)
        place = (m * LEVELS + level)[:, None] * table_stride + column[None, :]
        rows = tl.load(table + place, mask=column[None, :] < width[:, None], other=0.0)
        total += tl.sum(rows.to(tl.float32), axis=0)
    tl.store(out + frame * H + column, total, mask=column < H)


def dmel_embed_norm(bins: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the contract. A level outside [0, L) adds nothing."""
    check_rows("dmel_embed_norm", bins=bins, table=table, weight=weight)
    (frames, mel), width = bins.shape, table.shape[1]
    check_shapes("dmel_embed_norm", "bins TM, table RH=, weight H=", bins, table, weight,
                 R=table.shape[0] // mel * mel)  # fmt: skip
    out = torch.empty(frames, width, dtype=table.dtype, device=table.device)
    if frames:
        block = min(64, next_power_of_2(width))
        _dmel_kernel[(frames, ceil_div(width, block))](
            bins, table, out, bins.stride(0), table.stride(0), MEL=mel,
            LEVELS=table.shape[0] // mel, H=width, BLOCK=block,
            GROUP=min(128, next_power_of_2(mel)), PDL=pdl(), **options(num_warps=4),
        )  # fmt: skip
    return _norm("dmel_embed_norm", out, weight, eps, out, False)
