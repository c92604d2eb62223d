"""One or a few tokens through 4-bit experts without tensor cores: reading the weights is all.

A program takes some weight rows of one expert (first product), or of all experts of a token
(second product, which therefore also sums over the experts, in the order of the slots). It reads 16
codes as one 64-bit word, turns each nibble into a float32 with two shifts and a mask, and applies
the block scale once per word. Activations are multiplied by 2^63 beforehand, so that no product
with a decoded nibble, itself around 2^-126, is subnormal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_portable.backends.triton.routed_experts_decode import (
    e2m1_top,
    e4m3_scale,
    e8m0_scale,
)

UP_63 = tl.constexpr(2.0**63)


@triton.jit
def _halves(x, N: tl.constexpr, C: tl.constexpr):
    """Columns of x [N, C] at even and at odd places."""
    return tl.split(tl.reshape(x, (N, C // 2, 2)))


@triton.jit
def _eight(words, x, N: tl.constexpr):
    """[R, N]: the eight nibbles of int32 words [R, N] times x [N, 8], summed; times 2^-63."""
    even, odd = _halves(x, N, 8)
    x04, x26 = _halves(even, N, 4)
    x15, x37 = _halves(odd, N, 4)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    total = e2m1_top(words << 28) * x0[None, :]
    total += e2m1_top(words << 24) * x1[None, :]
    total += e2m1_top(words << 20) * x2[None, :]
    total += e2m1_top(words << 16) * x3[None, :]
    total += e2m1_top(words << 12) * x4[None, :]
    total += e2m1_top(words << 8) * x5[None, :]
    total += e2m1_top(words << 4) * x6[None, :]
    total += e2m1_top(words) * x7[None, :]
    return total


@triton.jit
def _words(w, scales, row_live, start, K: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr):
    """(words int64 [R, N], scales times 2^63 [R, N]) from word `start` of the rows at w, scales."""
    # Understating alignment keeps one word of each row in a lane, where the activations of that
    # word are too: nothing is exchanged between lanes, and a warp still reads 256 bytes at once.
    word = tl.multiple_of(start + tl.multiple_of(tl.arange(0, N), 1), 1)
    mask = row_live[:, None] & (word < K // 16)[None, :]
    words = tl.load(w + word[None, :], mask=mask, other=0)
    if FORMAT == "nvfp4":
        scale = e4m3_scale(tl.load(scales + word[None, :], mask=mask, other=0))
    else:
        # The layout of the words suits their scales too, which a stated contiguity brings about;
        # with the alignment of one byte no load becomes wider than one scale.
        half = tl.multiple_of(tl.max_contiguous(word // 2, N), 1)
        scale = e8m0_scale(tl.load(scales + half[None, :], mask=mask, other=0))
    return words, scale


@triton.jit
def _sixteen(x, start, end, N: tl.constexpr):
    """x at the 16 columns of N words, zero from word `end`: two times [N, 8], times 2^63."""
    word, column = start + tl.arange(0, N), tl.arange(0, 8)
    place = x + word[:, None] * 16 + column[None, :]
    inside = (word < end)[:, None]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32) * UP_63
    second = tl.load(place + 8, mask=inside, other=0.0).to(tl.float32) * UP_63
    return first, second


@triton.jit
def _partial(words, scale, first, second, N: tl.constexpr):
    """[R, N]: each word times its 16 values, scaled: the true number."""
    total = _eight(words.to(tl.int32), first, N)
    total += _eight((words >> 32).to(tl.int32), second, N)
    return total * scale


@triton.jit
def gemv_up_kernel(
    x,
    ids,
    w,
    scales,
    gains,
    out,
    experts,
    rows,
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
    FORMAT: tl.constexpr,
    GAIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EACH: tl.constexpr,
    N: tl.constexpr,
):
    """EACH gate and up rows, taken in turn, of the expert of pair program_id(1); out[pair, i]."""
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    if (expert >= 0) & (expert < experts):
        n = tl.program_id(0) * EACH + tl.arange(0, EACH)
        row_live = n < rows
        row = n if INTERLEAVED else (n % 2) * (rows // 2) + n // 2
        # 256 experts of 1536 x 3072 bytes pass 2^31 / 2.
        row, which = row.to(tl.int64), expert.to(tl.int64)
        w_rows = w + (which * w_expert + row * w_row)[:, None]
        scale_rows = scales + (which * s_expert + row * s_row)[:, None]
        x_row = x + (pair // TOP_K).to(tl.int64) * x_stride
        total = tl.zeros((EACH, N), dtype=tl.float32)
        for start in tl.static_range(0, K // 16, N):
            words, scale = _words(w_rows, scale_rows, row_live, start, K, N, FORMAT)
            first, second = _sixteen(x_row, start, K // 16, N)
            total += _partial(words, scale, first, second, N)
        sums = tl.sum(total, axis=1)
        if GAIN:
            sums *= tl.load(gains + which * g_expert + row * g_row, mask=row_live, other=0.0)
        # Gate and up are rounded to storage before the activation, as the contract says.
        stored = sums.to(x.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.reshape(stored, (EACH // 2, 2)))
        i = tl.program_id(0) * (EACH // 2) + tl.arange(0, EACH // 2)
        tl.store(out + pair.to(tl.int64) * out_stride + i, gate * tl.sigmoid(gate) * up,
                 mask=i < rows // 2)  # fmt: skip


@triton.jit
def gemv_down_kernel(
    inner,
    ids,
    weights,
    w,
    scales,
    gains,
    out,
    experts,
    rows,
    inner_stride,
    w_expert,
    w_row,
    s_expert,
    s_row,
    g_expert,
    g_row,
    out_stride,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GAIN: tl.constexpr,
    EACH: tl.constexpr,
    N: tl.constexpr,
):
    """EACH rows of every expert of token program_id(1), weighted and summed; out[token, row]."""
    token = tl.program_id(1)
    row = tl.program_id(0) * EACH + tl.arange(0, EACH)
    row_live = row < rows
    total = tl.zeros((EACH, N), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair)
        known = (expert >= 0) & (expert < experts)
        live = row < tl.where(known, rows, 0)
        which = tl.where(known, expert, 0).to(tl.int64)
        w_rows = w + (which * w_expert + row.to(tl.int64) * w_row)[:, None]
        scale_rows = scales + (which * s_expert + row.to(tl.int64) * s_row)[:, None]
        x_row = inner + pair.to(tl.int64) * inner_stride
        share = tl.load(weights + pair)
        if GAIN:
            gain = tl.load(gains + which * g_expert + row * g_row, mask=live, other=0.0) * share
        else:
            gain = tl.where(live, share, 0.0)
        here = tl.zeros((EACH, N), dtype=tl.float32)
        for start in tl.static_range(0, K // 16, N):
            words, scale = _words(w_rows, scale_rows, live, start, K, N, FORMAT)
            first, second = _sixteen(x_row, start, tl.where(known, K // 16, 0), N)
            here += _partial(words, scale, first, second, N)
        total += here * gain[:, None]
    tl.store(out + token.to(tl.int64) * out_stride + row, tl.sum(total, axis=1), mask=row_live)
