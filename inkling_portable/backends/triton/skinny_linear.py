"""Products of few rows with a large matrix: bound by reading the matrix, so arranged around that.

One row: a program reads whole rows of the matrix and needs no tensor core (`_row_kernel`). More
rows: tiles on tensor cores, the inner dimension split until every unit has work; the partial sums
are added in a fixed order by a second launch, so results do not depend on timing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.reference.linear import check_skinny
from inkling_portable.backends.triton._common import (
    ceil_div,
    check_rows,
    check_shapes,
    compute_units,
    is_rocm,
    next_power_of_2,
    options,
    order_is_fixed,
    pdl,
    target,
)


@triton.jit
def row_sums(
    x, weight, gammas, first, columns, weight_stride, segment_stride, dtype: tl.constexpr,
    K: tl.constexpr, SEGMENT: tl.constexpr, EACH: tl.constexpr, BK: tl.constexpr,
    HELD: tl.constexpr, WEIGHED: tl.constexpr, ONCE: tl.constexpr, TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row x [K] times rows `first` to `first + EACH` of the matrix -> [EACH] float32.

    Column k of row n is at n * weight_stride + (k // SEGMENT) * segment_stride + k % SEGMENT.
    WEIGHED, x is float32, multiplied by gammas[k // SEGMENT] and then rounded to `dtype`. The
    first HELD blocks of BK columns are asked for before x is waited for. TOGETHER neighbouring
    columns are added up at once: those of one thread, whose registers then hold the matrix and not
    sums. ONCE is how the matrix leaves the caches: what it drives out of them, code too, the next
    kernels fetch again.
    """
    n = first + tl.arange(0, EACH)
    inner = tl.arange(0, BK)
    live = (n < columns)[:, None]
    rows_of_matrix = n.to(tl.int64)[:, None] * weight_stride
    total = tl.zeros((EACH, BK // TOGETHER), dtype=tl.float32)
    held = ()
    for start in tl.static_range(0, HELD * BK, BK):
        k = start + inner
        place = ((k // SEGMENT).to(tl.int64) * segment_stride + k % SEGMENT)[None, :]
        w = tl.load(
            weight + rows_of_matrix + place, mask=live & (k < K)[None, :], other=0.0,
            eviction_policy=ONCE,
        )  # fmt: skip
        held = held + (w,)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.static_range(0, K, BK):
        k = start + inner
        inside = k < K
        if start < HELD * BK:
            w = held[start // BK]
        else:
            place = ((k // SEGMENT).to(tl.int64) * segment_stride + k % SEGMENT)[None, :]
            w = tl.load(
                weight + rows_of_matrix + place, mask=live & inside[None, :], other=0.0,
                eviction_policy=ONCE,
            )  # fmt: skip
        value = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
        if WEIGHED:
            value *= tl.load(gammas + k // SEGMENT, mask=inside, other=0.0)
            value = value.to(dtype).to(tl.float32)
        each = w.to(tl.float32) * value[None, :]
        if TOGETHER > 1:
            each = tl.sum(tl.reshape(each, (EACH, BK // TOGETHER, TOGETHER)), axis=2)
        total += each
    return tl.sum(total, axis=1)


@triton.jit
def gated(sums, dtype: tl.constexpr, EACH: tl.constexpr):
    """Sums of gate and up rows that alternate [EACH] -> silu(gate) * up [EACH // 2], float32.

    Gate and up are rounded to storage before the activation, as the contract says.
    """
    pair = tl.reshape(sums.to(dtype).to(tl.float32), (EACH // 2, 2))
    gate, up = tl.split(pair)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _row_kernel(
    x, weight, out, gammas, columns, x_stride, weight_stride, segment_stride, scale,
    K: tl.constexpr, SEGMENT: tl.constexpr, EACH: tl.constexpr, BK: tl.constexpr,
    SWIGLU: tl.constexpr, GROUP: tl.constexpr, WEIGHED: tl.constexpr,
    ONCE: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row program_id(1) of x against EACH rows of the matrix; see `row_sums`.

    With SWIGLU, rows 2i and 2i+1 are gate and up; the result of pair i, silu(gate) * up, is
    multiplied by gammas[row, i // GROUP].
    """
    first = tl.program_id(0) * EACH
    row = tl.program_id(1).to(tl.int64)
    sums = row_sums(
        x + row * x_stride, weight, gammas, first, columns, weight_stride, segment_stride,
        out.dtype.element_ty, K, SEGMENT, EACH, BK, 1, WEIGHED, ONCE, TOGETHER, PDL,
    )  # fmt: skip
    if SWIGLU:
        i = first // 2 + tl.arange(0, EACH // 2)
        inside = i < columns // 2
        gamma = tl.load(gammas + row * (columns // 2 // GROUP) + i // GROUP, mask=inside, other=0.0)
        y = gated(sums, x.dtype.element_ty, EACH) * gamma
        tl.store(out + row * (columns // 2) + i, y, mask=inside)
    else:
        n = first + tl.arange(0, EACH)
        tl.store(out + row * columns + n, sums * scale, mask=n < columns)


@triton.jit(do_not_specialize=["rows"])
def _tile_kernel(
    x,
    weight,
    out,
    rows,
    columns,
    inner_length,
    x_stride,
    weight_stride,
    segment_stride,
    part,
    scale,
    SEGMENT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EXACT_DOT: tl.constexpr,
    SCALED: tl.constexpr,
    RENEWED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one part of the inner dimension: out [parts, rows, columns].

    `part` is the length of a part, a multiple of BK; SEGMENT is 0 or a multiple of BK, and
    addresses the matrix as in `_row_kernel`.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    inner = tl.arange(0, BK)
    x_rows = x + m.to(tl.int64)[:, None] * x_stride
    w_rows = weight + n.to(tl.int64)[None, :] * weight_stride
    total = tl.zeros((BM, BN), dtype=tl.float32)
    lost = tl.zeros((BM, BN), dtype=tl.float32)
    begin = split * part
    end = tl.minimum(begin + part, inner_length)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(begin, end, BK):
        k = start + inner
        a = tl.load(x_rows + k[None, :], mask=(m < rows)[:, None] & (k < end)[None, :], other=0.0)
        place = w_rows
        within = k
        if SEGMENT > 0:
            place += (start // SEGMENT) * segment_stride.to(tl.int64)
            # Steps never straddle segments; said so, loads stay 16 bytes wide.
            within = tl.max_contiguous(tl.multiple_of(start % SEGMENT + inner, BK), BK)
        b = tl.load(
            place + within[:, None],
            mask=(n < columns)[None, :] & (k < end)[:, None],
            other=0.0,
        )
        if EXACT_DOT:
            # Compensated: storage is as narrow as the sums, so their roundings would show.
            more = tl.dot(a, b, input_precision="ieee") - lost
            grown = total + more
            lost = (grown - total) - more
            total = grown
        elif RENEWED:
            # Hopper's matrix units cut what they add to a sum: long ones are put together outside.
            lost = tl.dot(a, b, lost)
            if (start - begin) // BK % 2 == 1:
                total += lost
                lost = tl.zeros((BM, BN), dtype=tl.float32)
        else:
            total = tl.dot(a, b, total)
    if RENEWED:
        total += lost
    place = (split.to(tl.int64) * rows + m.to(tl.int64)[:, None]) * columns + n[None, :]
    if SCALED:  # large tiles, which have no register to spare, never are
        total *= scale
    tl.store(out + place, total, mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit
def _sum_kernel(
    parts, out, size, scale, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out[i] = scale times the sum of parts[p, i] in the order of p."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for p in tl.static_range(PARTS):
        total += tl.load(parts + p * size + i, mask=i < size, other=0.0)
    tl.store(out + i, total * scale, mask=i < size)


FIXED_ROWS = 1024
"""Rows of one launch in fixed order, where every tile's inner dimension passes through memory."""


def reading() -> dict[str, Any]:
    """How `row_sums` reads its matrix: in the way that was measured on Hopper, there."""
    hopper = target().arch == "sm90"
    return {"ONCE": "evict_first" if hopper else "", "TOGETHER": 8 if hopper else 1}


def row_tiling(inner: int, columns: int) -> tuple[int, int, int]:
    """(matrix rows of a program, inner block, warps) for one row of x.

    Several programs for each unit, on Hopper as many small ones as are there at a time; where one
    for each unit is enough, they ask for most of the matrix before they wait for x.
    """
    whole = max(8, next_power_of_2(inner))  # what `reading` adds up at once, at least
    if target().vendor == "cuda":
        if columns <= 4 * compute_units():
            return 2, min(4096, whole), 8
        if inner > 1024:
            small = target().arch == "sm90" and columns <= 16 * compute_units()
            return (2, 2048, 4) if small else (4, 2048, 8)
        if inner == 1024:
            return 8, 512, 4
    block = min(2048, whole)
    each = max(2, min(16, next_power_of_2(8192 // max(inner, 1))))
    return each, block, 4


def tile_tiling(rows: int, columns: int, inner: int, exact: bool) -> tuple[int, int, int, int, int]:
    """(BM, BN, BK, parts of the inner dimension, stages) for several rows of x."""
    fixed = order_is_fixed()
    tall = 64 if fixed else min(64, max(16, next_power_of_2(rows)))
    if target().vendor == "cpu":  # the interpreter pays by the operation, not by its size
        return tall, 128, 512, max(1, min(3, inner // 1024)), 1
    if exact:  # float32 runs on vector units: small blocks keep the code short
        return min(32, tall), 32, 32, 1, 1
    if fixed:  # enough parts for a single row; they are few enough for many
        return tall, 64, 64, max(1, min(inner // 256, 8)), 2 if is_rocm() else 3
    if rows > 64:  # enough tiles without splitting; larger ones, since reading is not the limit
        if target().vendor == "cuda":  # of 128 columns the compiler spills for sm100
            return 64, 64, 64, 1, 4 if target().arch == "sm90" else 3
        return 64, 128, 64, 1, 2
    wide, deep = 32, 128
    tiles = ceil_div(rows, tall) * ceil_div(columns, wide)
    # Two programs for each unit, but no part shorter than two steps. For 16 rows one for each was
    # timed to be enough on Hopper: no second launch.
    each = 1 if tall == 16 and target().arch == "sm90" and tiles >= compute_units() else 2
    parts = max(1, min(ceil_div(each * compute_units(), tiles), inner // (2 * deep), 16))
    return tall, wide, deep, parts, 2 if is_rocm() else 4


def product(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype, segment_stride: int = 0, segments: int = 1,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """x [M, K] times a matrix [N, K] transposed times `scale`: sums in float32, one rounding.

    With segments > 1 the matrix is weight [segments, N, K / segments], `segment_stride` apart, and
    its columns are the segments' side by side; K / segments is a multiple of 16.
    """
    rows, inner = x.shape
    columns = weight.shape[-2]
    if order_is_fixed() and rows > FIXED_ROWS:
        pieces = [product(x[i : i + FIXED_ROWS], weight, out_dtype, segment_stride, segments, scale)
                  for i in range(0, rows, FIXED_ROWS)]  # fmt: skip
        return torch.cat(pieces)
    out = torch.empty(rows, columns, dtype=out_dtype, device=x.device)
    if rows == 0 or columns == 0:
        return out
    segment = inner // segments
    if rows == 1 and not order_is_fixed():
        one_row(x, weight, out, segment_stride, segment, scale)
        return out
    exact = x.dtype == torch.float32
    tall, wide, deep, parts, stages = tile_tiling(rows, columns, inner, exact)
    if segments > 1:
        while segment % deep:
            deep //= 2
    renewed = rows > 64 and target().arch == "sm90" and not exact and not order_is_fixed()
    part = ceil_div(ceil_div(inner, parts), deep) * deep
    parts = ceil_div(inner, part)
    sums = out
    if parts > 1:
        sums = torch.empty(parts, rows, columns, dtype=torch.float32, device=x.device)
    _tile_kernel[(ceil_div(columns, wide), ceil_div(rows, tall), parts)](
        x, weight, sums, rows, columns, inner, x.stride(0), weight.stride(-2), segment_stride,
        part, scale, SEGMENT=segment if segments > 1 else 0, BM=tall,
        BN=wide, BK=deep, EXACT_DOT=exact, SCALED=parts == 1 and scale != 1.0, RENEWED=renewed,
        PDL=pdl(), **options(num_warps=4, num_stages=stages),
    )  # fmt: skip
    if parts > 1:
        size, block = rows * columns, 1024
        _sum_kernel[(ceil_div(size, block),)](
            sums, out, size, scale, PARTS=parts, BLOCK=block, PDL=pdl(), **options(num_warps=4)
        )
    return out


def one_row(
    x: Tensor, weight: Tensor, out: Tensor, segment_stride: int = 0, segment: int = 0,
    scale: float = 1.0, gammas: Tensor | None = None, group: int = 0,
) -> None:  # fmt: skip
    """One row x [1, K] through a matrix as in `product`, of segments of `segment` columns (0: one).

    With `gammas` [1, n], float32: where `group` is given, gate and up rows alternate, and out [1,
    F] has their activation, column i times gammas[0, i // group]; else x is float32 and its columns
    are multiplied by the gamma of their segment, with one rounding to the type of `out`.
    """
    columns, inner = weight.shape[-2], x.shape[1]
    segment = segment or inner
    each, block, warps = row_tiling(inner, columns)
    _row_kernel[(ceil_div(columns, each), 1)](
        x, weight, out, gammas, columns, x.stride(0), weight.stride(-2), segment_stride, scale,
        K=inner, SEGMENT=segment, EACH=each, BK=block, SWIGLU=group > 0,
        GROUP=max(1, group), WEIGHED=gammas is not None and not group, PDL=pdl(), **reading(),
        **options(num_warps=warps),
    )  # fmt: skip


def skinny_linear(x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """See the contract."""
    check_skinny(x, weight)
    check_rows("skinny_linear", x=x, weight=weight)
    check_shapes("skinny_linear", "x MK=, weight NK=", x, weight)
    return product(x, weight, x.dtype, scale=scale)
