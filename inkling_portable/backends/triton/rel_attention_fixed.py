"""rel_attention for batch invariance: a row's result depends on its own request alone, bit for bit.

Keys are cut at fixed places, whatever else is in the batch: every SPAN keys, and far into a long
context every COARSE * SPAN. One tile shape serves decoding, chunks and whole prompts; spans are
joined in their order. Spans of decoding requests, and of few row tiles, have programs of their own
and their sums go through memory; else one program takes all spans of a row tile. Both compute the
same numbers: spans and tiles that a row does not see leave its sums as they are, and products and
sums are not fused, since compilers fuse as surroundings suggest.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton import rel_attention as host
from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton._common import target as launch_target
from inkling_portable.backends.triton.rel_attention_tiles import (
    attend_request,
    beside_cache,
    clear_padding,
    power,
)
from inkling_portable.target import Target

SPAN = 512
"""Keys of a span: the scores of each are shifted by their own maximum, then spans are joined."""
FINE, COARSE = 128, 8
"""So many spans have SPAN keys, the later ones COARSE times as many: a graph captured for a context
of 1M then keeps 368 sums of a row and not 2,048, while 64K still have 128 programs."""
SCRATCH = 256 << 20
"""Bytes that spans may pass through memory in one call; beyond, programs take all of theirs."""


def tiles(target: Target, shape: tuning.Shape) -> tuning.Whole:
    """One shape for every step of a server: neither lengths nor their number matter."""
    if target.vendor == "cpu":
        return tuning.Whole(128, 64, 4, 1)  # the interpreter pays by the operation
    if shape.element > 2:
        return tuning.Whole(32, 32, 4, 1)
    if target.vendor == "rocm":
        stages = tuning._amd_stages(target)
        return tuning.Whole(64, 64 if shape.page % 64 == 0 else 32, 4, stages)
    tma = tuning._tma(target, shape, 64)
    n, warps = 64 if tma else 32, 8 if tuning._has_pdl(target) else 4
    return tuning.Whole(64, n, warps, tuning._stages(target, shape, 64, n, 2, 3), tma)


@triton.jit
def join(m, z, acc, next_m, next_z, next_acc, PRECISION: tl.constexpr):
    """Sums of keys seen so far and of the next span: m, z [M], acc [M, D]."""
    highest = tl.maximum(m, next_m)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    old = power(m - shift, PRECISION)
    new = power(next_m - shift, PRECISION)
    return highest, z * old + next_z * new, acc * old[:, None] + next_acc * new[:, None]


@triton.jit
def row_tiles_of(q_starts, batch, BATCH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """-> (request ids [BATCH], row tiles of each request [BATCH])."""
    ids = tl.arange(0, BATCH)
    real = ids < batch
    counts = tl.load(q_starts + ids + 1, mask=real, other=0)
    counts -= tl.load(q_starts + ids, mask=real, other=0)
    return ids, (counts * GROUP + M - 1) // M


@triton.jit
def span_start(span, FINE: tl.constexpr, COARSE: tl.constexpr):
    """Where a span begins, in units of the short ones."""
    return tl.minimum(span, FINE) + tl.maximum(span - FINE, 0) * COARSE


@triton.jit
def spans_until(place, FINE: tl.constexpr, COARSE: tl.constexpr):
    """How many spans hold the first `place` units."""
    return tl.minimum(place, FINE) + (tl.maximum(place - FINE, 0) + COARSE - 1) // COARSE


@triton.jit(do_not_specialize=["rows", "batch", "height", "spans"])
def attend_fixed(
    q, k_cache, v_cache, k_tiles, v_tiles, rel, pages, q_starts, kv_lens, out, part, part_stat,
    rows, batch, height, spans, scale, gain,
    q_t, q_h, q_d, k_page, k_row, k_head, k_d, v_page, v_row, v_head, v_d,
    k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
    rel_t, rel_h, rel_e, pages_b, out_t, out_h, out_d,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, BATCH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SPAN_TILES: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr,
    SPLIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row tile and KV head: with SPLIT every num_programs(1)-th span, else all in order.

    part [row tiles * KV_HEADS, spans, height, WIDTH] and part_stat [2, the same but WIDTH] hold
    float32 sums and maxima; their first axis counts row tiles as `row_tiles_of` lists them.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    program = tl.program_id(0) // KV_HEADS
    ids, counts = row_tiles_of(q_starts, batch, BATCH, GROUP, M)
    total = tl.sum(counts, 0)
    d = tl.arange(0, WIDTH)
    if program < total:
        # Late tiles see the most keys, so they start first.
        tile = total - 1 - program
        request = tl.sum((tl.cumsum(counts, 0) <= tile).to(tl.int32), 0)
        row_tile = tile - tl.sum(tl.where(ids < request, counts, 0), 0)
        start = tl.load(q_starts + request)
        fresh = tl.load(q_starts + request + 1) - start
        length = tl.load(kv_lens + request)

        packed = row_tile * M + tl.arange(0, M)
        token = packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        row_ok = token < fresh
        # Rows past the last token repeat it: nothing of theirs is stored.
        token = tl.minimum(token, fresh - 1)
        position = length - fresh + token
        lead = row_tile * M // GROUP
        line = tl.cast(start + lead, tl.int64)
        rel_rows = (token - lead) * rel_t + head * rel_h
        first = length - fresh + lead
        high = tl.minimum(length, length - fresh + (row_tile * M + M - 1) // GROUP + 1)
        low = tl.maximum(first - (WINDOW - 1), 0) if WINDOW > 0 else 0
        begin = low // N
        end = (high + N - 1) // N
        far = tl.maximum(first - (EXTENT - 1), 0) // N
        last_span = spans_until((end + SPAN_TILES - 1) // SPAN_TILES, FINE, COARSE)
        span = tl.program_id(1)

        query = tl.load(
            q + line * q_t + ((token - lead) * q_t + head * q_h)[:, None] + d[None, :] * q_d,
            mask=row_ok[:, None], other=0.0,
        )  # fmt: skip
        query = beside_cache(query, k_cache)
        rel_base = rel + line * rel_t
        table = pages + tl.cast(request, tl.int64) * pages_b
        m = tl.full((M,), float("-inf"), tl.float32)
        z = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, WIDTH), tl.float32)
        if WINDOW > 0:  # hardly longer than a span: all keys are one
            m, z, acc = attend_request(
                m, z, acc, query, rel_base, rel_rows, rel_e, position, (first, high - 1),
                k_cache, v_cache, k_tiles, v_tiles, table, kv_head, d, length, low, high,
                begin, far, end, scale,
                k_page, k_row, k_head, k_d, v_page, v_row, v_head, v_d,
                k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
                EXTENT, WINDOW, PAGE, N, TMA, PRECISION, STAGES,
            )  # fmt: skip
        else:
            while span < last_span:
                span_m = tl.full((M,), float("-inf"), tl.float32)
                span_z = tl.zeros((M,), tl.float32)
                span_acc = tl.zeros((M, WIDTH), tl.float32)
                span_m, span_z, span_acc = attend_request(
                    span_m, span_z, span_acc, query, rel_base, rel_rows, rel_e, position,
                    (first, high - 1),
                    k_cache, v_cache, k_tiles, v_tiles, table, kv_head, d, length, low, high,
                    span_start(span, FINE, COARSE) * SPAN_TILES, far,
                    tl.minimum(end, span_start(span + 1, FINE, COARSE) * SPAN_TILES), scale,
                    k_page, k_row, k_head, k_d, v_page, v_row, v_head, v_d,
                    k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
                    EXTENT, WINDOW, PAGE, N, TMA, PRECISION, STAGES,
                )  # fmt: skip
                if SPLIT:
                    slot = (tl.cast(tile, tl.int64) * KV_HEADS + kv_head) * spans + span
                    index = slot * height + tl.arange(0, M)
                    cells = tl.num_programs(0) * tl.cast(spans, tl.int64) * height
                    tl.store(part_stat + index, span_m, mask=row_ok)
                    tl.store(part_stat + cells + index, span_z, mask=row_ok)
                    tl.store(
                        part + index[:, None] * WIDTH + d[None, :], span_acc, mask=row_ok[:, None]
                    )
                else:
                    m, z, acc = join(m, z, acc, span_m, span_z, span_acc, PRECISION)
                span += tl.num_programs(1)
        if not SPLIT:
            acc = acc / tl.where(z > 0, z, 1.0)[:, None] * gain
            tl.store(
                out + line * out_t + ((token - lead) * out_t + head * out_h)[:, None] + d * out_d,
                acc.to(out.dtype.element_ty), mask=row_ok[:, None],
            )  # fmt: skip
    used = tl.load(q_starts + batch)
    worker = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    workers = tl.num_programs(0) * tl.num_programs(1)
    clear_padding(out, out_t, out_h, out_d, used, rows, worker, workers, HEADS, WIDTH)


@triton.jit(do_not_specialize=["batch", "tokens", "cells", "spans", "height"])
def join_spans(
    q_starts, kv_lens, part, part_stat, out, batch, tokens, cells, spans, height, gain,
    out_t, out_h, out_d,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BATCH: tl.constexpr,
    M: tl.constexpr, SPAN: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Join the spans of one (request, token, head), columns PART * id .. of WIDTH."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request = tl.program_id(0) // tokens
    token = tl.program_id(0) - request * tokens
    head = tl.program_id(1)
    start = tl.load(q_starts + request)
    fresh = tl.load(q_starts + request + 1) - start
    if token < fresh:
        ids, counts = row_tiles_of(q_starts, batch, BATCH, GROUP, M)
        packed = token * GROUP + head % GROUP
        tile = tl.sum(tl.where(ids < request, counts, 0), 0) + packed // M
        position = tl.load(kv_lens + request) - fresh + token
        first = (tl.cast(tile, tl.int64) * KV_HEADS + head // GROUP) * spans
        seen = spans_until(position // SPAN + 1, FINE, COARSE)
        one = tl.arange(0, 1)
        d = tl.program_id(2) * PART + tl.arange(0, PART)
        m = tl.full((1,), float("-inf"), tl.float32)
        z = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, PART), tl.float32)
        for span in tl.range(0, seen, num_stages=4):
            index = (first + span) * height + packed % M + one
            m, z, acc = join(
                m, z, acc, tl.load(part_stat + index), tl.load(part_stat + cells + index),
                tl.load(part + index[:, None] * WIDTH + d[None, :]), PRECISION,
            )  # fmt: skip
        acc = acc / tl.where(z > 0, z, 1.0)[:, None] * gain
        row = tl.cast(start + token, tl.int64) * out_t + head * out_h + one
        tl.store(out + row[:, None] + d[None, :] * out_d, acc.to(out.dtype.element_ty))


def rel_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """The contract of the same name; errors as in the module rel_attention."""
    host._check(q, k_cache, v_cache, rel, pages, q_starts, kv_lens, window, out)
    if not q.shape[0]:
        return
    if not kv_lens.shape[0]:
        out.zero_()
        return
    shape = host.describe(q, k_cache, v_cache, rel, kv_lens, max_q, max_kv, window)
    how, height, sequences, spans, programs = plan(launch_target(), shape)
    cells = sequences * spans * height if spans > 1 else 0
    part = torch.empty((cells, shape.width), dtype=torch.float32, device=q.device)
    stat = torch.empty((2, cells), dtype=torch.float32, device=q.device)
    batch = max(16, tuning.power_of_two(shape.batch))
    k_tiles, v_tiles, steps = host._matrices(how, k_cache, v_cache)
    precision = host._precision(q)
    unfused: dict[str, Any] = {"enable_fp_fusion": False}
    attend_fixed[(sequences, programs)](
        q, k_cache, v_cache, k_tiles, v_tiles, rel, pages, q_starts, kv_lens, out, part, stat,
        shape.rows, shape.batch, height, spans, scale * k_scale, v_scale,
        *q.stride(), *k_cache.stride(), *v_cache.stride(), *steps, *rel.stride(), pages.stride(0),
        *out.stride(),
        HEADS=shape.heads, KV_HEADS=shape.kv_heads, WIDTH=shape.width, EXTENT=shape.extent,
        WINDOW=shape.window, PAGE=shape.page, BATCH=batch, M=how.m, N=how.n,
        SPAN_TILES=SPAN // how.n, FINE=FINE, COARSE=COARSE, SPLIT=spans > 1, TMA=how.tma,
        PRECISION=precision, STAGES=how.stages, num_warps=how.warps, num_stages=how.stages,
        **unfused,
    )  # fmt: skip
    if spans > 1:
        tokens, columns = max(1, min(shape.max_q, shape.rows)), min(32, shape.width)
        join_spans[(shape.batch * tokens, shape.heads, shape.width // columns)](
            q_starts, kv_lens, part, stat, out, shape.batch, tokens, cells, spans, height, v_scale,
            *out.stride(), HEADS=shape.heads, KV_HEADS=shape.kv_heads, WIDTH=shape.width,
            BATCH=batch, M=how.m, SPAN=SPAN, FINE=FINE, COARSE=COARSE, PART=columns,
            PRECISION=precision, num_warps=1, **unfused,
        )  # fmt: skip


@functools.cache
def plan(target: Target, shape: tuning.Shape) -> tuple[tuning.Whole, int, int, int, int]:
    """-> (tiles, most rows of a tile, tiles times KV heads, spans, programs that share them).

    One span and program mean that each program takes all spans of its rows.
    """
    how, units = tiles(target, shape), tuning._units(target)
    height = min(how.m, max(1, min(shape.max_q, shape.rows)) * shape.group)
    sequences = tuning.row_tiles(shape, how.m) * shape.kv_heads
    short = -(-max(1, shape.max_kv) // SPAN)
    spans = min(short, FINE) + -(-max(0, short - FINE) // COARSE)
    size = sequences * spans * height * (shape.width + 2) * 4
    # Rows that fill the chip need no more programs; unless they decode, where one may see far more
    # keys than all others, and sums weigh little beside the keys.
    full = sequences >= units and height == how.m
    if shape.window > 0 or full or size > SCRATCH:
        return how, height, sequences, 1, 1
    # Programs without a span cost little, but a batch of short requests has many of them.
    return how, height, sequences, spans, max(1, min(spans, 64 * units // sequences))
