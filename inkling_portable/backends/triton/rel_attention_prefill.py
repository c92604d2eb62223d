"""One program per tile of packed query rows: prefill, and short windows that need no split.

The grid counts row tiles with host bounds; each program finds its request and tile from the true
lengths and leaves at once if there is none. Late tiles see the most keys, so they start first. Of
dependent launches the same holds as in rel_attention_decode.
"""

import triton
import triton.language as tl

from inkling_portable.backends.triton.rel_attention_tiles import (
    LOG2E,
    attend_request,
    beside_cache,
    clear_padding,
)


@triton.jit(do_not_specialize=["rows", "batch", "few", "pages_b"])
def attend_whole(
    q, k_cache, v_cache, k_tiles, v_tiles, rel, pages, q_starts, kv_lens, out, far_lse,
    rows, batch, few, scale, gain,
    q_t, q_h, q_d, k_page, k_row, k_head, k_d, v_page, v_row, v_head, v_d,
    k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
    rel_t, rel_h, rel_e, pages_b, out_t, out_h, out_d,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, BATCH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, CLEAR: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """All keys of one row tile and KV head, for requests with more than `few` new tokens.

    With FAR, `out` holds what the keys at distances from EXTENT on contribute to each row and
    far_lse [HEADS, rows] their log-sum-exp; WINDOW is EXTENT, and the nearer keys are added. Both
    are undefined for rows that have no such keys.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    program = tl.program_id(0) // KV_HEADS
    ids = tl.arange(0, BATCH)
    real = ids < batch
    counts = tl.load(q_starts + ids + 1, mask=real, other=0)
    counts -= tl.load(q_starts + ids, mask=real, other=0)
    counts = tl.where(counts > few, (counts * GROUP + M - 1) // M, 0)
    total = tl.sum(counts, 0)
    d = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if program < total:
        tile = total - 1 - program
        ends = tl.cumsum(counts, 0)
        request = tl.sum((ends <= tile).to(tl.int32), 0)
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
        if FAR:
            # The softmax goes on where the far keys left it: as if one key of that mass was seen.
            has_far = row_ok & (position >= EXTENT)
            lse = tl.load(
                far_lse + tl.cast(head, tl.int64) * rows + start + token, mask=has_far,
                other=float("-inf"),
            )  # fmt: skip
            m = lse if PRECISION == "ieee" or PRECISION == "last" else lse * LOG2E
            z = tl.where(has_far, 1.0, 0.0)
            acc = tl.load(
                out + line * out_t + ((token - lead) * out_t + head * out_h)[:, None] + d * out_d,
                mask=has_far[:, None], other=0.0,
            ).to(tl.float32)  # fmt: skip
        m, z, acc = attend_request(
            m, z, acc, query, rel_base, rel_rows, rel_e, position,
            (first, high - 1),
            k_cache, v_cache, k_tiles, v_tiles, table, kv_head, d, length, low, high,
            begin, far, end, scale,
            k_page, k_row, k_head, k_d, v_page, v_row, v_head, v_d,
            k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
            EXTENT, WINDOW, PAGE, N, TMA, PRECISION, STAGES,
        )  # fmt: skip
        acc = acc / tl.where(z > 0, z, 1.0)[:, None] * gain
        tl.store(
            out + line * out_t + ((token - lead) * out_t + head * out_h)[:, None] + d * out_d,
            acc.to(out.dtype.element_ty), mask=row_ok[:, None],
        )  # fmt: skip
    if CLEAR:
        used = tl.load(q_starts + batch)
        clear_padding(
            out, out_t, out_h, out_d, used, rows, tl.program_id(0), tl.num_programs(0),
            HEADS, WIDTH,
        )  # fmt: skip
