"""What the kernels of relative attention share: packed rows, key tiles, the running softmax.

A *packed row* is one query head of one query token; the rows of one KV head are numbered
token * group + head, so that a tile of rows reads each key once for all heads of its group. Every
packed row keeps its own place in the bias table: packing never changes which bias it gets.
A *key tile* is `N` consecutive keys of one request, aligned to N. Keys and values that are stored
in 8 bits are widened to the type of the queries; their scales are in the factors `scale` of the
scores and `gain` of the results.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_span(fresh, length, N: tl.constexpr, WINDOW: tl.constexpr):
    """First key tile and number of key tiles that `fresh` last tokens of `length` can see."""
    if WINDOW > 0:
        low = tl.maximum(length - fresh - (WINDOW - 1), 0) // N
    else:
        low = length * 0
    return low, tl.where(fresh > 0, (length + N - 1) // N - low, 0)


@triton.jit
def page_of(table, tile, low, high, PAGE: tl.constexpr, N: tl.constexpr):
    """Page ids of a key tile: one where a page holds whole tiles, else one per key.

    Keys outside [low, high) ask for nothing: the table may end, and a page may have been freed.
    """
    if PAGE % N == 0:
        key = tile * N
        page = tl.load(table + key // PAGE, mask=(key + N > low) & (key < high), other=0)
    else:
        key = tile * N + tl.arange(0, N)
        page = tl.load(table + key // PAGE, mask=(key >= low) & (key < high), other=0)
    return page.to(tl.int64)


@triton.jit
def cache_at(base, page, tile, stride_page, stride_row, PAGE: tl.constexpr, N: tl.constexpr):
    """Pointers [N, D] to the rows of a key tile; `base` is [1, D].

    Page offsets are 64-bit, since caches pass 2**31 elements; offsets within a page do not.
    """
    if PAGE % N == 0:
        row = (tile * N) % PAGE + tl.arange(0, N)
        at = (base + page * stride_page) + row[:, None] * stride_row
    else:
        row = (tile * N + tl.arange(0, N)) % PAGE
        at = base + (page * stride_page + row * stride_row)[:, None]
    return at


@triton.jit
def beside_cache(query, cache):
    """Queries for products with keys of `cache`: in float16 where those have 8 bits.

    One instruction widens two of them to float16, which holds all their numbers; to bfloat16 there
    is none. Normed queries are far from where float16 ends.
    """
    if cache.dtype.element_ty.primitive_bitwidth == 8 and query.dtype == tl.bfloat16:
        query = query.to(tl.float16)
    return query


@triton.jit
def product(a, b, c, PRECISION: tl.constexpr):
    """c + a @ b in float32. "wide" is for the interpreter, which takes bfloat16 for integers."""
    if PRECISION == "wide":
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    elif PRECISION == "ieee" or PRECISION == "last":
        c = tl.dot(a, b, c, input_precision="ieee")
    else:
        c = tl.dot(a, b, c)
    return c


@triton.jit
def scores(q, k, start, PRECISION: tl.constexpr):
    """start [M, N] + q @ k transposed. "last": `start`, larger than sums on the way, is added last,
    by a fused product: a plain sum the compiler would make the beginning again."""
    if PRECISION == "last":
        s = product(q, tl.trans(k.to(q.dtype)), tl.zeros_like(start), PRECISION)
        s = tl.fma(s, tl.full(s.shape, 1.0, tl.float32), start)
    else:
        s = product(q, tl.trans(k.to(q.dtype)), start, PRECISION)
    return s


@triton.jit
def power(x, PRECISION: tl.constexpr):
    """exp for maxima and scores as `fold` keeps them: to base 2, but for float32 to base e.

    The hardware's exponential is off by up to four units in the last place of a float32, hence a
    polynomial there (x = n ln 2 + r, |r| < 0.35). x <= 0.
    """
    if PRECISION == "ieee" or PRECISION == "last":
        n = tl.floor(tl.maximum(x, -88.0) * LOG2E + 0.5)
        r = (tl.maximum(x, -88.0) - n * 0.693359375) + n * 2.12194440e-4
        y = 1.0 + r * (1.0 + r * (0.5 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r / 720)))))
        y = tl.where(x < -87.0, 0.0, y * tl.exp2(n))
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def fold(m, z, acc, s, factor, v, PRECISION: tl.constexpr):
    """Add one tile to the running softmax: s [M, N], -inf where hidden; v [N, D].

    Scores are s * factor with factor > 0. For 16-bit inputs they and the maxima m are kept to base
    2: then scaling, shifting and the exponential are two instructions; in float32 that rounding
    would show. A row may have no visible key so far: its maximum stays -inf, its sums stay 0.
    """
    if PRECISION == "ieee" or PRECISION == "last":
        unit = factor
    else:
        unit = factor * LOG2E
    highest = tl.maximum(m, tl.max(s, 1) * unit)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    p = power(s * unit - shift[:, None], PRECISION)
    shrink = power(m - shift, PRECISION)
    z = z * shrink + tl.sum(p, 1)
    acc = product(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)
    return highest, z, acc


@triton.jit
def bias_strips(
    rel, rel_rows, rel_step, position, key, N: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Bias [M, N] of `near_start` in the type of `rel`, read in strips of 32 keys.

    Each lane of a warp reads one column. A wider load would deal a thread more rows, hence more
    pointers, instead of more columns. The loop's variable goes into the row pointers, so that
    nothing per element can be hoisted out of the loop, where it would be kept in registers and
    spilled.
    """
    if N > 32:
        H: tl.constexpr = N // 2
        left = bias_strips(rel, rel_rows, rel_step, position, key, H, EXTENT, WINDOW, MASKED)
        right = bias_strips(rel, rel_rows, rel_step, position, key + H, H, EXTENT, WINDOW, MASKED)
        bias = tl.permute(tl.join(left, right), (0, 2, 1)).reshape(position.shape[0], N)
    else:
        LIMIT: tl.constexpr = min(EXTENT, WINDOW) if WINDOW > 0 else EXTENT
        column = tl.arange(0, N)[None, :]
        row = (rel - tl.cast(key, tl.int64) * rel_step) + (rel_rows + position * rel_step)
        # Columns lie in falling order; called contiguous, they are dealt to neighbouring lanes by
        # every Triton version. Nothing is read as a vector: no row is known to be aligned.
        at = tl.max_contiguous(row[:, None] - column * rel_step, [1, N])
        if MASKED:
            # As unsigned numbers, negative distances are beyond any limit: one comparison does.
            since = position - key
            distance = (since[:, None] - column).to(tl.uint32)
            bias = tl.load(at, mask=distance < LIMIT, other=0.0)
            visible = distance < WINDOW if WINDOW > 0 else since[:, None] >= column
            bias = tl.where(visible, bias, float("-inf"))
        else:
            bias = tl.load(at)
    return bias


@triton.jit
def near_start(
    rel, rel_rows, rel_step, position, span, key, per_scale, N: tl.constexpr,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """What scores [M, N] of keys key .. key+N-1 start from: bias over scale, -inf where hidden.

    The matrix product adds to it, and one factor then scales both: so the bias is brought into the
    product's layout once, still in the type of `rel`, and the softmax stays in that layout.
    rel_rows [M] are 32-bit offsets from `rel`, position [M] lies within span = (first, last): both
    valid for every row of the tile. Most tiles are within the extent and the past of all rows and
    need no mask.
    """
    LIMIT: tl.constexpr = min(EXTENT, WINDOW) if WINDOW > 0 else EXTENT
    if (key + N - 1 <= span[0]) & (span[1] - key < LIMIT):
        bias = bias_strips(rel, rel_rows, rel_step, position, key, N, EXTENT, WINDOW, False)
    else:
        bias = bias_strips(rel, rel_rows, rel_step, position, key, N, EXTENT, WINDOW, True)
    return bias.to(tl.float32) * per_scale


@triton.jit
def near_tile(
    m, z, acc, q, rel, rel_rows, rel_step, position, span, k_base, v_base, page, tile, low, high,
    k_page, k_row, v_page, v_row, scale, EXTENT: tl.constexpr, WINDOW: tl.constexpr,
    PAGE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold one key tile with bias and masks; keys outside [low, high) are not read."""
    keys = tile * N + tl.arange(0, N)
    real = ((keys >= low) & (keys < high))[:, None]
    k = tl.load(cache_at(k_base, page, tile, k_page, k_row, PAGE, N), mask=real, other=0.0)
    s = near_start(rel, rel_rows, rel_step, position, span, tile * N, 1 / scale, N, EXTENT, WINDOW)
    s = scores(q, k, s, PRECISION)
    v = tl.load(cache_at(v_base, page, tile, v_page, v_row, PAGE, N), mask=real, other=0.0)
    return fold(m, z, acc, s, scale, v.to(q.dtype), PRECISION)


@triton.jit
def attend_keys(
    m, z, acc, q, rel, rel_rows, rel_step, position, span, k_base, v_base, table, low, high,
    begin, far, end, k_page, k_row, v_page, v_row, scale,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold key tiles begin .. end-1 into (m [M], z [M], acc [M, D]).

    Tiles before `far` are beyond the extent of every row and, without a window, visible to all:
    no bias, no mask. The next tile's page id is fetched one turn ahead.
    """
    last = tl.minimum(high, end * N)
    page = page_of(table, begin, low, last, PAGE, N)
    if WINDOW == 0:
        middle = tl.minimum(tl.maximum(far, begin), end)
        for tile in tl.range(begin, middle, num_stages=STAGES):
            k = tl.load(cache_at(k_base, page, tile, k_page, k_row, PAGE, N))
            s = scores(q, k, tl.zeros((q.shape[0], N), tl.float32), PRECISION)
            v = tl.load(cache_at(v_base, page, tile, v_page, v_row, PAGE, N))
            page = page_of(table, tile + 1, low, last, PAGE, N)
            m, z, acc = fold(m, z, acc, s, scale, v.to(q.dtype), PRECISION)
        begin = middle
    for tile in tl.range(begin, end, num_stages=STAGES):
        m, z, acc = near_tile(
            m, z, acc, q, rel, rel_rows, rel_step, position, span, k_base, v_base, page, tile, low,
            high, k_page, k_row, v_page, v_row, scale, EXTENT, WINDOW, PAGE, N, PRECISION,
        )  # fmt: skip
        page = page_of(table, tile + 1, low, last, PAGE, N)
    return m, z, acc


@triton.jit
def page_row(table, tile, k_page_rows, v_page_rows, PAGE: tl.constexpr, N: tl.constexpr):
    """Rows of a key tile's first key in the two-dimensional views of both caches."""
    page = tl.load(table + tile * N // PAGE)
    within = (tile * N) % PAGE
    return page * k_page_rows + within, page * v_page_rows + within


@triton.jit
def attend_whole_tiles(
    m, z, acc, q, rel, rel_rows, rel_step, position, span, k_tiles, v_tiles, table, length,
    k_row0, k_col, k_page_rows, v_row0, v_col, v_page_rows, begin, far, end, scale,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`attend_keys` with tensor descriptors (TMA), which read whole tiles.

    The tile that holds the request's last key comes last and alone: what follows that key in its
    page may be NaN, so its scores are hidden and its values cleared.
    """
    full = tl.maximum(tl.minimum(end, length // N), begin)
    if WINDOW == 0:
        middle = tl.minimum(tl.maximum(far, begin), full)
        for tile in tl.range(begin, middle, num_stages=STAGES):
            k_at, v_at = page_row(table, tile, k_page_rows, v_page_rows, PAGE, N)
            k = k_tiles.load([k_row0 + k_at, k_col])
            v = v_tiles.load([v_row0 + v_at, v_col])
            s = scores(q, k, tl.zeros((q.shape[0], N), tl.float32), PRECISION)
            m, z, acc = fold(m, z, acc, s, scale, v.to(q.dtype), PRECISION)
        begin = middle
    for tile in tl.range(begin, full, num_stages=STAGES):
        k_at, v_at = page_row(table, tile, k_page_rows, v_page_rows, PAGE, N)
        k = k_tiles.load([k_row0 + k_at, k_col])
        v = v_tiles.load([v_row0 + v_at, v_col])
        s = near_start(
            rel, rel_rows, rel_step, position, span, tile * N, 1 / scale, N, EXTENT, WINDOW
        )
        s = scores(q, k, s, PRECISION)
        m, z, acc = fold(m, z, acc, s, scale, v.to(q.dtype), PRECISION)
    if full < end:
        k_at, v_at = page_row(table, full, k_page_rows, v_page_rows, PAGE, N)
        k = k_tiles.load([k_row0 + k_at, k_col])
        s = near_start(
            rel, rel_rows, rel_step, position, span, full * N, 1 / scale, N, EXTENT, WINDOW
        )
        s = scores(q, k, s, PRECISION)
        real = full * N + tl.arange(0, N) < length
        s = tl.where(real[None, :], s, float("-inf"))
        v = v_tiles.load([v_row0 + v_at, v_col])
        v = tl.where(real[:, None], v, tl.zeros_like(v))
        m, z, acc = fold(m, z, acc, s, scale, v.to(q.dtype), PRECISION)
    return m, z, acc


@triton.jit
def attend_request(
    m, z, acc, q, rel, rel_rows, rel_step, position, span, k_cache, v_cache, k_tiles, v_tiles,
    table, kv_head, d, length, low, high, begin, far, end, scale,
    k_page, k_row, k_head, k_d, v_page, v_row, v_head, v_d,
    k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
    EXTENT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold key tiles begin .. end-1 of one request and KV head, by the fastest loads there are."""
    if TMA:
        m, z, acc = attend_whole_tiles(
            m, z, acc, q, rel, rel_rows, rel_step, position, span, k_tiles, v_tiles, table, length,
            kv_head * k_head_rows, kv_head * k_head_cols, k_page_rows,
            kv_head * v_head_rows, kv_head * v_head_cols, v_page_rows, begin, far, end, scale,
            EXTENT, WINDOW, PAGE, N, PRECISION, STAGES,
        )  # fmt: skip
    else:
        m, z, acc = attend_keys(
            m, z, acc, q, rel, rel_rows, rel_step, position, span,
            k_cache + tl.cast(kv_head, tl.int64) * k_head + d[None, :] * k_d,
            v_cache + tl.cast(kv_head, tl.int64) * v_head + d[None, :] * v_d,
            table, low, high, begin, far, end, k_page, k_row, v_page, v_row, scale,
            EXTENT, WINDOW, PAGE, N, PRECISION, STAGES,
        )  # fmt: skip
    return m, z, acc


@triton.jit
def clear_padding(
    out, out_t, out_h, out_d, first, rows, worker, workers,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Set rows first .. rows-1 of `out` to 0; each of `workers` programs takes every n-th row."""
    d = tl.arange(0, WIDTH)
    zero = tl.zeros((WIDTH,), out.dtype.element_ty)
    for row in range(first + worker, rows, workers):
        for head in range(HEADS):
            tl.store(out + tl.cast(row, tl.int64) * out_t + head * out_h + d * out_d, zero)
