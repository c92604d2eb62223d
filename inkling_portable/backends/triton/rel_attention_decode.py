"""Few query tokens per request: the keys are split over a persistent grid, then combined.

All work of a step is one line of key tiles, request after request; program p takes the p-th equal
stretch of it. So one long request among short ones occupies the whole chip, and a request that
fits in one stretch needs no combining. Every program derives this plan from the true lengths with
one prefix sum over the batch; nothing is read back by the host and no plan kernel is launched.

A stretch holds at most one end of a request that began earlier and at most one beginning of a
request that goes on: two slots of scratch per program are enough.

Launched dependently, a program plans before what runs before it has ended. So lengths, row starts
and pages are to be there before the kernel that is launched right before begins: in a model other
kernels lie between; what that kernel itself writes, queries, bias, keys and values, is waited for.
"""

import triton
import triton.language as tl

from inkling_portable.backends.triton.rel_attention_tiles import (
    attend_request,
    beside_cache,
    clear_padding,
    power,
    tile_span,
)


@triton.jit
def split_plan(
    q_starts, kv_lens, batch, few, programs, least, BATCH: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """-> (request ids [BATCH], key tiles of each request in the line [BATCH], total, stretch).

    Requests with more than `few` new tokens have none: another kernel serves them.
    """
    ids = tl.arange(0, BATCH)
    real = ids < batch
    fresh = tl.load(q_starts + ids + 1, mask=real, other=0)
    fresh -= tl.load(q_starts + ids, mask=real, other=0)
    length = tl.load(kv_lens + ids, mask=real, other=0)
    _, tiles = tile_span(fresh, length, N, WINDOW)
    sequences = (fresh * GROUP + M - 1) // M * KV_HEADS
    units = tl.where(fresh <= few, sequences * tiles, 0)
    total = tl.sum(units, 0)
    stretch = tl.maximum((total + programs - 1) // programs, least)
    return ids, units, total, stretch


@triton.jit(do_not_specialize=["rows", "batch", "few", "programs", "least", "pages_b"])
def attend_split(
    q, k_cache, v_cache, k_tiles, v_tiles, rel, pages, q_starts, kv_lens, out, part, part_stat,
    rows, batch, few, programs, least, scale, gain,
    q_t, q_h, q_d, k_page, k_row, k_head, k_d, v_page, v_row, v_head, v_d,
    k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
    rel_t, rel_h, rel_e, pages_b, out_t, out_h, out_d,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, BATCH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, CLEAR: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One stretch of the line. part [2 * programs, M, WIDTH] and part_stat [2, 2 * programs, M]
    (maxima, then sums) are float32 scratch: slot p for an end, programs + p for a beginning."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    ids, units, total, stretch = split_plan(
        q_starts, kv_lens, batch, few, programs, least, BATCH, GROUP, KV_HEADS, M, N, WINDOW
    )
    ends = tl.cumsum(units, 0)
    d = tl.arange(0, WIDTH)
    at = program * stretch
    stop = tl.minimum(at + stretch, total)
    # Taller tiles leave no register for a plan that is made ahead.
    LATE: tl.constexpr = PDL and M == 16
    if PDL and not LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    while at < stop:
        request = tl.sum((ends <= at).to(tl.int32), 0)
        offset = at - tl.sum(tl.where(ids < request, units, 0), 0)
        start = tl.load(q_starts + request)
        fresh = tl.load(q_starts + request + 1) - start
        length = tl.load(kv_lens + request)
        first_tile, tiles = tile_span(fresh, length, N, WINDOW)
        sequence = offset // tiles
        begin = offset - sequence * tiles
        end = tl.minimum(tiles, begin + stop - at)
        row_tile = sequence // KV_HEADS
        kv_head = sequence - row_tile * KV_HEADS

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
        far = tl.maximum(first - (EXTENT - 1), 0) // N
        if LATE:  # from the second time on at once
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

        query = tl.load(
            q + line * q_t + ((token - lead) * q_t + head * q_h)[:, None] + d[None, :] * q_d,
            mask=row_ok[:, None], other=0.0,
        )  # fmt: skip
        m = tl.full((M,), float("-inf"), tl.float32)
        z = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, WIDTH), tl.float32)
        query = beside_cache(query, k_cache)
        rel_base = rel + line * rel_t
        table = pages + tl.cast(request, tl.int64) * pages_b
        m, z, acc = attend_request(
            m, z, acc, query, rel_base, rel_rows, rel_e, position,
            (first, high - 1),
            k_cache, v_cache, k_tiles, v_tiles, table, kv_head, d, length, low, high,
            tl.maximum(first_tile + begin, low // N), far,
            tl.minimum(first_tile + end, (high + N - 1) // N), scale,
            k_page, k_row, k_head, k_d, v_page, v_row, v_head, v_d,
            k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
            EXTENT, WINDOW, PAGE, N, TMA, PRECISION, STAGES,
        )  # fmt: skip
        if (begin == 0) & (end == tiles):
            acc = acc / tl.where(z > 0, z, 1.0)[:, None] * gain
            tl.store(
                out + line * out_t + ((token - lead) * out_t + head * out_h)[:, None] + d * out_d,
                acc.to(out.dtype.element_ty), mask=row_ok[:, None],
            )  # fmt: skip
        else:
            slot = tl.where(begin == 0, programs + program, program)
            index = slot * M + tl.arange(0, M)
            tl.store(part_stat + index, m, mask=row_ok)
            tl.store(part_stat + 2 * programs * M + index, z, mask=row_ok)
            tl.store(part + index[:, None] * WIDTH + d[None, :], acc, mask=row_ok[:, None])
        at += end - begin
    if LATE:  # without a stretch too: who comes next relies on what came before
        tl.extra.cuda.gdc_wait()
    if CLEAR:
        used = tl.load(q_starts + batch)
        clear_padding(out, out_t, out_h, out_d, used, rows, program, programs, HEADS, WIDTH)


@triton.jit(do_not_specialize=["batch", "few", "tokens", "programs", "least"])
def combine_split(
    q_starts, kv_lens, part, part_stat, out, batch, few, tokens, programs, least, gain,
    out_t, out_h, out_d,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    BATCH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
    PIECES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the pieces of one (request, token, head), columns PART * id .. of WIDTH.

    Pieces without a visible key have maximum -inf and weigh nothing.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request = tl.program_id(0) // tokens
    token = tl.program_id(0) - request * tokens
    head = tl.program_id(1)
    start = tl.load(q_starts + request)
    fresh = tl.load(q_starts + request + 1) - start
    packed = token * GROUP + head % GROUP
    row_tile = packed // M
    first = 0
    last = 0
    # The lengths were written before the kernel that this one waits for began.
    if (token < fresh) & (fresh <= few):
        ids, units, _, stretch = split_plan(
            q_starts, kv_lens, batch, few, programs, least, BATCH, GROUP, KV_HEADS, M, N, WINDOW
        )
        _, tiles = tile_span(fresh, tl.load(kv_lens + request), N, WINDOW)
        begin = tl.sum(tl.where(ids < request, units, 0), 0)
        begin += (row_tile * KV_HEADS + head // GROUP) * tiles
        first = begin // stretch
        last = (begin + tiles - 1) // stretch
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if last > first:
        d = tl.program_id(2) * PART + tl.arange(0, PART)
        lane = packed - row_tile * M
        m = tl.full((), float("-inf"), tl.float32)
        z = tl.zeros((), tl.float32)
        acc = tl.zeros((PART,), tl.float32)
        for base in range(first, last + 1, PIECES):
            piece = base + tl.arange(0, PIECES)
            real = piece <= last
            index = tl.where(piece == first, programs + piece, piece) * M + lane
            stat = tl.load(part_stat + index, mask=real, other=float("-inf"))
            mass = tl.load(part_stat + 2 * programs * M + index, mask=real, other=0.0)
            values = tl.load(
                part + index[:, None] * WIDTH + d[None, :], mask=real[:, None], other=0.0
            )
            highest = tl.maximum(m, tl.max(stat, 0))
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            weight = power(stat - shift, PRECISION)
            shrink = power(m - shift, PRECISION)
            z = z * shrink + tl.sum(weight * mass, 0)
            acc = acc * shrink + tl.sum(weight[:, None] * values, 0)
            m = highest
        acc = acc / tl.where(z > 0, z, 1.0) * gain
        row = tl.cast(start + token, tl.int64)
        tl.store(out + row * out_t + head * out_h + d * out_d, acc.to(out.dtype.element_ty))
