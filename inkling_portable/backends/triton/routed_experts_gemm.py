"""Routed experts on tensor cores: tiles of one expert's rows against the tokens that chose it.

A tile is BN weight rows by BM tokens, the weights as the left operand, because they are many and
the tokens few. Which tokens: without a plan, the tile's rows are the step's tokens themselves, and
of all (token, slot) pairs that chose an expert only the first one's programs work; with a plan
(`routed_experts_sort`), tiles list the pairs of one expert. Weights are read once per tile, decoded
in registers, and never written anywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_portable.backends.triton.routed_experts_decode import (
    e2m1_pair,
    e2m1_pair_ptx,
    e4m3_scale,
    e4m3_scale_bf16,
    e4m3_value,
    e8m0_scale,
    e8m0_scale_bf16,
)


@triton.jit
def _unplanned(ids, tokens, first, TOP_K: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr):
    """(expert, pair of each token or -1, whether pair `first` is the first one of its expert)."""
    expert = tl.load(ids + first)
    token, slot = tl.arange(0, BM), tl.arange(0, KP)
    exists = (token < tokens)[:, None] & (slot < TOP_K)[None, :]
    pair = token[:, None] * TOP_K + slot[None, :]
    chosen = tl.load(ids + pair, mask=exists, other=-1)
    mine = exists & (chosen == expert)
    pairs = tl.max(tl.where(mine, pair, -1), axis=1)
    leads = tl.sum(tl.sum((mine & (pair < first)).to(tl.int32), axis=1), axis=0) == 0
    return expert, pairs, leads


@triton.jit
def _planned(plan, tile, experts, tiles, BM: tl.constexpr):
    """(expert or -1, pair of each row or -1); the plan's parts are described where it is made."""
    expert = tl.load(plan + 3 * experts + tile)
    known = expert >= 0
    count = tl.load(plan + expert, mask=known, other=0)
    start = tl.load(plan + experts + expert, mask=known, other=0)
    row = (tile - start) * BM + tl.arange(0, BM)
    listed = plan + 3 * experts + tiles + tile * BM + tl.arange(0, BM)
    return expert, tl.load(listed, mask=row < count, other=-1)


@triton.jit
def _dot(a, b, total, lost, EXACT: tl.constexpr):
    """(total + a @ b^T, what the sum lost).

    EXACT, for float32: compensated, since storage is as narrow as the sums.
    """
    if EXACT:
        more = tl.dot(a, tl.trans(b), input_precision="ieee") - lost
        grown = total + more
        lost = (grown - total) - more
        total = grown
    else:
        total = tl.dot(a, tl.trans(b), total)
    return total, lost


@triton.jit
def _product(x, rows, live, x_stride, w, place, row_live, scales, scale_place,
             K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             FORMAT: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """[BN, BM] float32: weight rows at `w + place` times the rows of x, without gain.

    4-bit formats without PTX: times 2^-63.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    FOUR: tl.constexpr = FORMAT == "nvfp4" or FORMAT == "mxfp4"
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    total = tl.zeros((BN, BM), dtype=tl.float32)
    lost = tl.zeros((BN, BM), dtype=tl.float32)
    k = tl.arange(0, BK)
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    if FOUR:
        byte, block = tl.arange(0, BK // 2), tl.arange(0, BK // BLOCK)
        for start in range(0, K, BK):
            if K % BK == 0:
                packed = tl.load(w + place[:, None] + (start // 2 + byte)[None, :],
                                 mask=row_live[:, None], other=0)  # fmt: skip
                codes = tl.load(scales + scale_place[:, None] + (start // BLOCK + block)[None, :],
                                mask=row_live[:, None], other=0)  # fmt: skip
                values = tl.load(x_rows + (start + k)[None, :], mask=live[:, None], other=0.0)
            else:
                packed = tl.load(w + place[:, None] + (start // 2 + byte)[None, :],
                                 mask=row_live[:, None] & (start // 2 + byte < K // 2)[None, :],
                                 other=0)  # fmt: skip
                codes = tl.load(scales + scale_place[:, None] + (start // BLOCK + block)[None, :],
                                mask=row_live[:, None]
                                & (start // BLOCK + block < K // BLOCK)[None, :],
                                other=0)  # fmt: skip
                inside = start + k < K
                values = tl.load(x_rows + (start + k)[None, :],
                                 mask=live[:, None] & inside[None, :], other=0.0)  # fmt: skip
            if PTX:
                scale = e4m3_scale_bf16(codes) if FORMAT == "nvfp4" else e8m0_scale_bf16(codes)
            else:
                scale = e4m3_scale(codes) if FORMAT == "nvfp4" else e8m0_scale(codes)
            wide = tl.broadcast_to(scale[:, :, None], (BN, BK // BLOCK, BLOCK // 2))
            wide = tl.reshape(wide, (BN, BK // 2))
            if PTX:
                even, odd = e2m1_pair_ptx(packed, wide)
            else:
                even, odd = e2m1_pair(packed, wide, DTYPE)
            x_even, x_odd = tl.split(tl.reshape(values, (BM, BK // 2, 2)))
            total, lost = _dot(even, x_even, total, lost, EXACT)
            total, lost = _dot(odd, x_odd, total, lost, EXACT)
    else:
        for start in range(0, K, BK):
            inside = start + k < K
            values = tl.load(x_rows + (start + k)[None, :], mask=live[:, None] & inside[None, :],
                             other=0.0)  # fmt: skip
            matrix = tl.load(w + place[:, None] + (start + k)[None, :],
                             mask=row_live[:, None] & inside[None, :], other=0)  # fmt: skip
            if FORMAT == "bf16":
                matrix = matrix.to(DTYPE)
            else:
                matrix = e4m3_value(matrix, FORMAT == "fp8fnuz", DTYPE)
            total, lost = _dot(matrix, values, total, lost, EXACT)
    return total


@triton.jit(do_not_specialize=["tokens", "tiles", "first_row", "last_row"])
def tile_kernel(
    x,
    ids,
    plan,
    w,
    scales,
    gains,
    weights,
    out,
    tokens,
    experts,
    tiles,
    rows,
    first_row,
    last_row,
    x_stride,
    w_expert,
    w_row,
    s_expert,
    s_row,
    g_expert,
    g_row,
    out_stride,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    KP: tl.constexpr,
    FORMAT: tl.constexpr,
    GAIN: tl.constexpr,
    UP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PLANNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EXACT: tl.constexpr,
    PTX: tl.constexpr,
):
    """One tile of one product.

    UP: rows of x are tokens, the weight rows are taken as gate and up in turn, and silu(gate) * up
    goes to out[pair, i]. Else rows of x are pairs, and weights[pair] times the product goes to the
    float32 out[pair, n - first_row] for n in first_row .. last_row - 1.
    """
    n = first_row + tl.program_id(0) * BN + tl.arange(0, BN)
    tile = tl.program_id(1)
    if PLANNED:
        expert, pairs = _planned(plan, tile, experts, tiles, BM)
        works = expert >= 0
    else:
        expert, pairs, leads = _unplanned(ids, tokens, tile, TOP_K, KP, BM)
        works = leads & (expert >= 0) & (expert < experts)
    if works:
        live = pairs >= 0
        pair = tl.maximum(pairs, 0)
        row_live = n < last_row
        if UP and not INTERLEAVED:
            row = (n % 2) * (rows // 2) + n // 2
        else:
            row = n
        # 256 experts of 6144 x 1536 bytes pass 2^31.
        row, which = row.to(tl.int64), expert.to(tl.int64)
        total = _product(
            x, pair // TOP_K if UP else pair, live, x_stride,
            w, which * w_expert + row * w_row, row_live, scales, which * s_expert + row * s_row,
            K, BM, BN, BK, FORMAT, EXACT, PTX,
        )  # fmt: skip
        if (FORMAT == "nvfp4" or FORMAT == "mxfp4") and not PTX:
            total *= 2.0**63
        if GAIN:
            gain = tl.load(gains + which * g_expert + row * g_row, mask=row_live, other=0.0)
            total *= gain[:, None]
        if UP:
            # Gate and up are rounded to storage before the activation, as the contract says.
            stored = total.to(x.dtype.element_ty).to(tl.float32)
            both = tl.permute(tl.reshape(stored, (BN // 2, 2, BM)), (0, 2, 1))
            gate, up = tl.split(both)
            i = first_row // 2 + tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
            place = pair.to(tl.int64)[None, :] * out_stride + i[:, None]
            tl.store(out + place, gate * tl.sigmoid(gate) * up,
                     mask=live[None, :] & (i < last_row // 2)[:, None])  # fmt: skip
        else:
            weight = tl.load(weights + pair, mask=live, other=0.0)
            place = pair.to(tl.int64)[None, :] * out_stride + (n - first_row)[:, None]
            tl.store(out + place, total * weight[None, :], mask=live[None, :] & row_live[:, None])


@triton.jit
def combine_kernel(
    parts,
    ids,
    out,
    experts,
    width,
    parts_stride,
    out_stride,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = sum of parts[t * TOP_K + s] over slots s in order; unknown experts add nothing."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + slot)
        # Nothing was written for a pair whose expert is not one of ours.
        end = tl.where((expert >= 0) & (expert < experts), width, 0)
        total += tl.load(parts + (token * TOP_K + slot) * parts_stride + column,
                         mask=column < end, other=0.0)  # fmt: skip
    tl.store(out + token * out_stride + column, total, mask=column < width)
