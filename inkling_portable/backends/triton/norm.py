"""Norms: a program holds a row in registers; both halves of a draft input run side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton._common import (
    check_rows,
    check_shapes,
    options,
    pdl,
    row_block,
)


@triton.jit
def scaled(wide, weight, H: tl.constexpr, eps):
    """One-rounding RMS norm of a row in registers: wide, weight float32 [BLOCK], zero past H."""
    return wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps) * weight


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x,
    residual,
    weight,
    normed,
    summed,
    rows,
    x_stride,
    residual_stride,
    eps,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [T, H], or [H / CHUNK, T, CHUNK] as an all-gather leaves it; outputs [T, H]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    if HAS_NORM:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if CHUNK == H:
        place = x + row * x_stride + column
    else:
        place = x + ((column // CHUNK) * rows.to(tl.int64) + row) * CHUNK + column % CHUNK
    total = tl.load(place, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        more = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        total = (total.to(tl.float32) + more.to(tl.float32)).to(total.dtype)
        tl.store(summed + row * H + column, total, mask=inside)
    if HAS_NORM:
        tl.store(normed + row * H + column, scaled(total.to(tl.float32), gain, H, eps), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    check_rows("rms_norm", x=x, weight=weight, residual=residual)
    check_shapes("rms_norm", "x TH=, weight H, residual TH=", x, weight, residual)
    rows, width = x.shape
    normed = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(normed)
    add_norm(x, residual, weight, eps, normed, summed, x.stride(0), width)
    return normed, summed


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    normed: Tensor,
    summed: Tensor,
    x_stride: int,
    chunk: int,
) -> None:
    """Launch the norm kernel: `x` is [T, H] with a row stride, or [H / chunk, T, chunk]."""
    rows, width = summed.shape
    if rows == 0:
        return
    block, warps = row_block("rms_norm", width)
    _norm_kernel[(rows,)](
        x, residual, weight, normed, summed, rows, x_stride,
        0 if residual is None else residual.stride(0), eps, H=width, CHUNK=chunk, BLOCK=block,
        HAS_RESIDUAL=residual is not None, HAS_NORM=weight is not None, PDL=pdl(),
        **options(num_warps=warps),
    )  # fmt: skip


@triton.jit
def _table_row(ids, table, row, column, table_stride, vocabulary, H: tl.constexpr):
    """Row ids[row] of a table, in its dtype; zeros where the id lies outside the table."""
    token = tl.load(ids + row).to(tl.int64)
    # An unknown id reads no column: a scalar in `mask & scalar` would trip Triton's interpreter.
    width = tl.where((token >= 0) & (token < vocabulary), H, 0)
    return tl.load(table + token * table_stride + column, mask=column < width, other=0.0)


@triton.jit
def _embed_norm_kernel(
    ids,
    table,
    weight,
    out,
    table_stride,
    vocabulary,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    gain = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    embedding = _table_row(ids, table, row, column, table_stride, vocabulary, H)
    tl.store(out + row * H + column, scaled(embedding.to(tl.float32), gain, H, eps), column < H)


def embed_norm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the contract. Ids outside the table, as padding rows may hold, give zeros."""
    check_rows("embed_norm", ids=ids, table=table, weight=weight)
    check_shapes("embed_norm", "ids T, table VH, weight H", ids, table, weight)
    rows, (vocabulary, width) = ids.shape[0], table.shape
    out = torch.empty(rows, width, dtype=table.dtype, device=table.device)
    if rows:
        block, warps = row_block("embed_norm", width)
        _embed_norm_kernel[(rows,)](
            ids, table, weight, out, table.stride(0), vocabulary, eps, H=width, BLOCK=block,
            PDL=pdl(), **options(num_warps=warps),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["vocabulary"])
def _halves_kernel(
    hidden,
    embeds,
    ids,
    backbone_weight,
    hidden_weight,
    embed_weight,
    out,
    hidden_stride,
    embeds_stride,
    vocabulary,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    FROM_TABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, 0) norms the hidden row, program (t, 1) the embedding; out [T, 2H]."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < H
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = out + row * (2 * H) + half * H + column
    if half == 0:
        value = tl.load(hidden + row * hidden_stride + column, mask=inside, other=0.0)
        gain = tl.load(hidden_weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, scaled(value.to(tl.float32), gain, H, eps), mask=inside)
    else:
        if FROM_TABLE:
            raw = _table_row(ids, embeds, row, column, embeds_stride, vocabulary, H)
            first = tl.load(backbone_weight + column, mask=inside, other=0.0).to(tl.float32)
            value = scaled(raw.to(tl.float32), first, H, eps).to(raw.dtype)
        else:
            value = tl.load(embeds + row * embeds_stride + column, mask=inside, other=0.0)
        gain = tl.load(embed_weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, scaled(value.to(tl.float32), gain, H, eps), mask=inside)


def _halves(
    op: str,
    hidden: Tensor,
    embeds: Tensor,
    ids: Tensor | None,
    backbone_weight: Tensor | None,
    hidden_weight: Tensor,
    embed_weight: Tensor,
    eps: float,
) -> Tensor:
    check_rows(op, hidden=hidden, embeds=embeds, ids=ids, backbone_weight=backbone_weight,
               hidden_weight=hidden_weight, embed_weight=embed_weight)  # fmt: skip
    check_shapes(op, f"hidden TH=, {'embeds T' if ids is None else 'table V'}H=, ids T, "
                 "backbone_weight H, hidden_weight H, embed_weight H", hidden, embeds, ids,
                 backbone_weight, hidden_weight, embed_weight)  # fmt: skip
    rows, width = hidden.shape
    out = torch.empty(rows, 2 * width, dtype=hidden.dtype, device=hidden.device)
    if rows:
        block, warps = row_block(op, width)
        _halves_kernel[(rows, 2)](
            hidden, embeds, ids, backbone_weight, hidden_weight, embed_weight, out,
            hidden.stride(0), embeds.stride(0), embeds.shape[0], eps, H=width, BLOCK=block,
            FROM_TABLE=ids is not None, PDL=pdl(), **options(num_warps=warps),
        )  # fmt: skip
    return out


def embed_norm_chain(
    hidden: Tensor,
    ids: Tensor,
    table: Tensor,
    backbone_weight: Tensor,
    hidden_weight: Tensor,
    embed_weight: Tensor,
    eps: float,
) -> Tensor:
    """See the contract. Ids outside the table, as padding rows may hold, give zeros."""
    return _halves("embed_norm_chain", hidden, table, ids, backbone_weight, hidden_weight,
                   embed_weight, eps)  # fmt: skip


def concat_norms(
    hidden: Tensor, embeds: Tensor, hidden_weight: Tensor, embed_weight: Tensor, eps: float
) -> Tensor:
    """See the contract."""
    return _halves("concat_norms", hidden, embeds, None, None, hidden_weight, embed_weight, eps)
