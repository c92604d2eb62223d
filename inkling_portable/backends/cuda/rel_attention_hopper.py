"""Prefill for Hopper: two warpgroups multiply, others fetch; tensor cores add the bias.

A tile of rows belongs to one request and KV head. Its bias for one tile of 128 keys is, for each
token, a stretch of 128 neighbouring distances: TMA reads it from wherever it begins and fills with
zeros what lies outside the extent. Distances fall where keys rise, so the stretch is backwards;
multiplied by a matrix with 1 / scale on its other diagonal it is turned round and lands, exactly,
in the accumulator to which q . k is added next. No thread ever touches a bias.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inkling_portable.backends.triton import rel_attention as whole
from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton._common import target
from inkling_portable.backends.triton.rel_attention_tuning import Plan

# Names of Triton 3.6, and of later versions.
barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier
reinterpret: Any = getattr(gl.shared_memory_descriptor, "_reinterpret", None)
reinterpret = reinterpret or gl.shared_memory_descriptor.reinterpret
load_box: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

LOG2E = gl.constexpr(1.4426950408889634)
N = gl.constexpr(128)  # keys of a tile
D = gl.constexpr(128)  # width of a head
HALF = gl.constexpr(64)  # rows of one warpgroup
SPARE = gl.constexpr(16)  # columns of bias beyond two panels of 64: see fetch_bias
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
NARROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
SPARE_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))
SPARE_BOX = gl.constexpr(gl.NVMMASharedLayout(32, 16, 3))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
PANEL = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SPARE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


# From here on this kernel was faster on an H200 than the Triton kernels: new tokens times heads in
# layers without and with a window, and keys without one.
LEAST_WORK, LEAST_LOCAL_WORK, LEAST_KEYS = 16384, 65536, 8192


def serves(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> bool:  # fmt: skip
    """Whether this file's kernel serves a call and pays: host integers only."""
    work = min(max_q, q.shape[0]) * q.shape[1]
    pays = work >= LEAST_LOCAL_WORK if window else work >= LEAST_WORK and max_kv >= LEAST_KEYS
    plain = k_scale == v_scale == 1
    return pays and plain and fits(q, k_cache, v_cache, rel, kv_lens, window, scale, out)


def fits(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, kv_lens: Tensor, window: int,
    scale: float, out: Tensor,
) -> bool:  # fmt: skip
    """Whether the kernel can read these tensors."""
    return (
        q.shape[1] // k_cache.shape[2] in (4, 8)
        and q.shape[2] == 128
        and k_cache.shape[1] % 128 == 0
        and k_cache.dtype == q.dtype == torch.bfloat16
        and rel.is_contiguous()
        and rel.numel() < 1 << 31
        and rel.shape[2] >= 512
        and rel.shape[2] % 8 == 0
        and window <= rel.shape[2]
        and q.stride(2) == out.stride(2) == 1
        # The matrix that turns the bias round holds 1 / scale in bfloat16.
        and math.frexp(scale)[0] == 0.5
        and whole.describe(q, k_cache, v_cache, rel, kv_lens, 1, 1, window).descriptors
    )


def rel_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rel: Tensor,
    pages: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    max_q: int,
    max_kv: int,
    window: int,
    scale: float,
    out: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """The contract of the same name; what the kernel does not fit, short requests among it, goes
    to the Triton kernels."""
    whole._check(q, k_cache, v_cache, rel, pages, q_starts, kv_lens, window, out)
    fitting = k_scale == v_scale == 1 and kv_lens.shape[0] and q.shape[0]
    if not fitting or not fits(q, k_cache, v_cache, rel, kv_lens, window, scale, out):
        whole.rel_attention(
            q, k_cache, v_cache, rel, pages, q_starts, kv_lens, max_q, max_kv, window, scale, out,
            k_scale, v_scale,
        )  # fmt: skip
        return
    shape = whole.describe(q, k_cache, v_cache, rel, kv_lens, max_q, max_kv, window)
    plan = tuning.plan(target(), shape)
    if plan.few is None and shape.batch > 1:
        plan = Plan(tuning.split(target(), shape, tuning.MIXED_ROWS), plan.many,
                    tuning.MIXED_TOKENS)  # fmt: skip
    few = plan.few_tokens if plan.few is not None else 0
    if plan.few is not None:
        whole.attend(
            Plan(plan.few, None, few), q, k_cache, v_cache, rel, pages, q_starts, kv_lens, max_q,
            max_kv, window, scale, out,
        )  # fmt: skip
    if plan.many is None:
        return
    # Few different sizes: each is a kernel of its own, and this one compiles for many seconds.
    batch = 64 if shape.batch <= 64 else max(1024, tuning.power_of_two(shape.batch))
    k_tiles, k_steps = _matrix(k_cache)
    v_tiles, v_steps = _matrix(v_cache)
    attend_hopper[(_tiles(shape) * shape.kv_heads,)](
        q, k_tiles, v_tiles, *_boxes(rel, shape.group), rel, pages, q_starts, kv_lens, out,
        shape.rows, shape.batch, few, scale, q.stride(0), q.stride(1), *k_steps, *v_steps,
        pages.stride(0), out.stride(0), out.stride(1),
        HEADS=shape.heads, KV_HEADS=shape.kv_heads, EXTENT=shape.extent, WINDOW=window,
        PAGE=shape.page, BATCH=batch, num_warps=4,
    )  # fmt: skip


def _matrix(cache: Tensor) -> tuple[TensorDescriptor, tuple[int, int, int]]:
    """A cache as one matrix, in boxes of 128 keys, and the steps to its pages and heads."""
    plain, steps = whole._descriptor(cache, 128, "cache")
    return TensorDescriptor(cache, plain.shape, plain.strides, [128, 128], SWIZZLED.value), steps


def _boxes(rel: Tensor, group: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The bias [T, heads, extent] in boxes of 64 and of 16 distances; see fetch_bias."""
    _, heads, extent = rel.shape
    shape = [64 // group, heads, rel.numel()]
    strides = [8 * (heads * extent + 1), extent, 1]
    return tuple(
        TensorDescriptor(rel, shape, strides, [64 // group, group, columns], layout.value)
        for columns, layout in ((64, BOX), (16, SPARE_BOX))
    )


def _tiles(shape: tuning.Shape) -> int:
    """How many tiles of 128 rows the requests can have at most: four for each span of tokens."""
    span = 512 // shape.group
    each = -(-min(shape.max_q, shape.rows) // span)
    return 4 * min(shape.batch * each, shape.rows // span + shape.batch)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def fetch_keys(
    k_tiles, v_tiles, k_smem, v_smem, k_full, k_empty, v_full, v_empty, table, begin, end,
    k_row0, k_col, k_page_rows, v_row0, v_col, v_page_rows, PAGE: gl.constexpr,
):  # fmt: skip
    """Tiles end-1 .. begin into two stages each of keys and values."""
    for i in range(end - begin):
        key = (end - 1 - i) * N
        page = gl.load(table + key // PAGE)
        within = key % PAGE
        stage = i & 1
        free = ((i >> 1) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), N * D * 2)
        load_box(
            k_tiles, [k_row0 + page * k_page_rows + within, k_col], k_full.index(stage),
            k_smem.index(stage),
        )  # fmt: skip
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), N * D * 2)
        load_box(
            v_tiles, [v_row0 + page * v_page_rows + within, v_col], v_full.index(stage),
            v_smem.index(stage),
        )  # fmt: skip


@gluon.jit
def fetch_bias(
    wide_boxes, spare_boxes, b_smem, c_smem, full, empty, token, position, begin, end, kv_head,
    half: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, EXTENT: gl.constexpr,
):  # fmt: skip
    """Backward bias of tiles end-1 .. begin for one warpgroup: every eighth token from `token`.

    A box is cut from memory with a stride in which the distance rises with the token. TMA reads
    from multiples of 16 bytes only: what a tile begins with lies position + 1 modulo 8 columns
    into its first box, the same for all rows, and up to 7 columns end in the spare box.
    """
    for i in range(end - begin):
        start = position - ((end - 1 - i) * N + N - 1) - ((position + 1) & 7)
        start += (token * HEADS) * EXTENT
        mbarrier.wait(empty.index(half), (i & 1) ^ 1)
        mbarrier.expect(full.index(half), HALF * (N + SPARE) * 2)
        head = kv_head * GROUP
        for side in gl.static_range(2):
            load_box(
                wide_boxes, [0, head, start + 64 * side], full.index(half),
                b_smem.index(2 * half + side),
            )  # fmt: skip
        load_box(spare_boxes, [0, head, start + N], full.index(half), c_smem.index(half))


@gluon.jit
def copy_panel(
    rel, panel, token, distance, tokens_left, kv_head, HEADS: gl.constexpr, GROUP: gl.constexpr,
    EXTENT: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    for part in gl.static_range(2):
        r = gl.arange(0, 32, layout=gl.SliceLayout(1, LAYOUT)) + 32 * part
        y = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
        later = r // GROUP * 8
        at = (token + later).to(gl.int64) * (HEADS * EXTENT)
        at += (kv_head * GROUP + r % GROUP) * EXTENT
        since = (distance + later)[:, None] + y[None, :]
        inside = (since >= 0) & (since < EXTENT) & (later < tokens_left)[:, None]
        panel.slice(32 * part, 32).store(gl.load(rel + at[:, None] + since, mask=inside, other=0.0))


@gluon.jit
def copy_bias(
    b, c, key, where, half: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    EXTENT: gl.constexpr,
):  # fmt: skip
    """What `fetch_bias` fetches, by plain loads: at the end of the rows, behind which memory may
    end or hold NaN."""
    rel, token, position, tokens_left, _by_hand, kv_head = where
    start = position - (key + N - 1) - ((position + 1) & 7)
    for side in gl.static_range(2):
        copy_panel(rel, b.index(2 * half + side), token, start + 64 * side, tokens_left, kv_head,
                   HEADS, GROUP, EXTENT, 64, PANEL)  # fmt: skip
    copy_panel(rel, c.index(half), token, start + N, tokens_left, kv_head, HEADS, GROUP, EXTENT,
               SPARE, SPARE_ROWS)  # fmt: skip
    fence_async_shared()
    barrier()


@gluon.jit
def within_extent(s, distance, EXTENT: gl.constexpr):
    """Set to 0 what boxes hold of other rows, beyond the extent; distance [HALF] of column 0."""
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, NARROW))
    return gl.where(distance[:, None] - column[None, :] < EXTENT, s, 0.0)


@gluon.jit
def near_scores(
    q, shared, where, i, key, half: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    EXTENT: gl.constexpr, EDGE: gl.constexpr, HAND: gl.constexpr,
):  # fmt: skip
    """Begin the scores of the i-th tile, bias / scale + q . k, for the first and last 64 keys."""
    k_smem, _v, b_smem, c_smem, j_smem, h_smem, k_full, _ke, _vf, _ve, b_full, _be = shared
    b = reinterpret(b_smem, gl.bfloat16, [4, HALF, 64], SWIZZLED)
    c = reinterpret(c_smem, gl.bfloat16, [2, HALF, SPARE], SPARE_SWIZZLED)
    if HAND:
        if where[4]:
            copy_bias(b, c, key, where, half, HEADS, GROUP, EXTENT)
        else:
            mbarrier.wait(b_full.index(half), i & 1)
    else:
        mbarrier.wait(b_full.index(half), i & 1)
    turned, rest = j_smem.index(half), h_smem.index(half)
    s0 = gl.zeros([HALF, 64], gl.float32, NARROW)
    s1 = gl.zeros([HALF, 64], gl.float32, NARROW)
    s1 = warpgroup_mma(b.index(2 * half), turned, s1, use_acc=False, is_async=True)
    s1 = warpgroup_mma(b.index(2 * half + 1).slice(0, SPARE, 1), rest, s1, is_async=True)
    s0 = warpgroup_mma(b.index(2 * half + 1), turned, s0, use_acc=False, is_async=True)
    s0 = warpgroup_mma(c.index(half), rest, s0, is_async=True)
    if EDGE:
        s0, s1 = warpgroup_mma_wait(0, deps=[s0, s1])
        row = gl.arange(0, HALF, layout=gl.SliceLayout(1, NARROW))
        distance = where[2] + row // GROUP * 8 - key
        s0 = within_extent(s0, distance, EXTENT)
        s1 = within_extent(s1, distance - 64, EXTENT)
    mbarrier.wait(k_full.index(i & 1), (i >> 1) & 1)
    k = k_smem.index(i & 1)
    s0 = warpgroup_mma(q, k.slice(0, 64).permute((1, 0)), s0, is_async=True)
    s1 = warpgroup_mma(q, k.slice(64, 64).permute((1, 0)), s1, is_async=True)
    return s0, s1


@gluon.jit
def side_by_side(s0, s1):
    """[HALF, N] of two halves of its columns: a renaming of registers."""
    s = gl.reshape(gl.permute(gl.join(s0, s1), (0, 2, 1)), [HALF, N])
    return gl.convert_layout(s, MMA, assert_trivial=True)


@gluon.jit
def soften(
    m, z, s, unit, position, key, GROUP: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr
):
    """-> (maxima, sums, weights [HALF, N], what earlier sums shrink by); scores to base 2."""
    if MASKED:
        row = gl.arange(0, HALF, layout=gl.SliceLayout(1, MMA))
        column = gl.arange(0, N, layout=gl.SliceLayout(0, MMA))
        distance = (position + row // GROUP * 8 - key)[:, None] - column[None, :]
        if WINDOW > 0:
            s = gl.where(distance.to(gl.uint32, bitcast=True) < WINDOW, s, float("-inf"))
        else:
            s = gl.where(distance >= 0, s, float("-inf"))
    highest = gl.maximum(m, gl.max(s, 1) * unit)
    shift = highest
    if MASKED:
        shift = gl.where(highest == float("-inf"), 0.0, highest)
    p = gl.exp2(s * unit - shift[:, None])
    shrink = gl.exp2(m - shift)
    return highest, z * shrink + gl.sum(p, 1), p, shrink


@gluon.jit
def weights(p):
    return gl.convert_layout(
        p.to(gl.bfloat16), gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    )


@gluon.jit
def turn(
    m, z, acc, p, q, shared, where, i, tile, unit, half: gl.constexpr, HEADS: gl.constexpr,
    GROUP: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, NEAR: gl.constexpr,
    EDGE: gl.constexpr, MASKED: gl.constexpr, HAND: gl.constexpr,
):  # fmt: skip
    """The i-th tile (i > 0): its softmax runs while the tile before is multiplied with values."""
    k_smem, v_smem, _b, _c, _j, _h, k_full, k_empty, v_full, v_empty, _bf, b_empty = shared
    before = (i - 1) & 1
    if NEAR:
        s0, s1 = near_scores(q, shared, where, i, tile * N, half, HEADS, GROUP, EXTENT, EDGE, HAND)
        mbarrier.wait(v_full.index(before), ((i - 1) >> 1) & 1)
        acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
        s0, s1 = warpgroup_mma_wait(1, deps=[s0, s1])
        s = side_by_side(s0, s1)
        barrier()
        mbarrier.arrive(b_empty.index(half))
    else:
        mbarrier.wait(k_full.index(i & 1), (i >> 1) & 1)
        s = gl.zeros([HALF, N], gl.float32, MMA)
        s = warpgroup_mma(q, k_smem.index(i & 1).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((i - 1) >> 1) & 1)
        acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        barrier()
    mbarrier.arrive(k_empty.index(i & 1))
    m, z, soft, shrink = soften(m, z, s, unit, where[2], tile * N, GROUP, WINDOW, MASKED)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    barrier()
    mbarrier.arrive(v_empty.index(before))
    return m, z, acc * shrink[:, None], weights(soft)


@gluon.jit
def consume(
    q_smem, shared, where, out, begin, left, edge, clear, end, length, unit,
    out_t, out_h, half: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    EXTENT: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """All tiles of one warpgroup's 64 rows, from the last. `out` points at its first token."""
    if end > begin:
        _k, v_smem, _b, _c, _j, _h, _kf, k_empty, v_full, _ve, _bf, b_empty = shared
        q = q_smem.index(half)
        m = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        z = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, MMA))
        acc = gl.zeros([HALF, D], gl.float32, MMA)
        at_last = (end - 1) * N
        s0, s1 = near_scores(
            q, shared, where, 0, at_last, half, HEADS, GROUP, EXTENT, WINDOW == 0, True
        )
        s0, s1 = warpgroup_mma_wait(0, deps=[s0, s1])
        s = side_by_side(s0, s1)
        barrier()
        mbarrier.arrive(k_empty.index(0))
        mbarrier.arrive(b_empty.index(half))
        m, z, soft, _shrink = soften(m, z, s, unit, where[2], at_last, GROUP, WINDOW, True)
        p = weights(soft)
        if length < end * N:
            # What follows the last key in its page may be NaN; both warpgroups clear it alike.
            mbarrier.wait(v_full.index(0), 0)
            for part in gl.static_range(4):
                some = v_smem.index(0).slice(32 * part, 32)
                key = gl.arange(0, 32, layout=gl.SliceLayout(1, ROWS)) + at_last + 32 * part
                v = some.load(ROWS)
                some.store(gl.where((key < length)[:, None], v, gl.zeros_like(v)))
            fence_async_shared()
            barrier()
        i = 1
        for tile in range(end - 2, clear - 1, -1):
            m, z, acc, p = turn(
                m, z, acc, p, q, shared, where, i, tile, unit, half, HEADS, GROUP, EXTENT, WINDOW,
                True, WINDOW == 0, True, True,
            )  # fmt: skip
            i += 1
        for tile in range(clear - 1, edge - 1, -1):
            m, z, acc, p = turn(
                m, z, acc, p, q, shared, where, i, tile, unit, half, HEADS, GROUP, EXTENT, WINDOW,
                True, False, False, False,
            )  # fmt: skip
            i += 1
        for tile in range(edge - 1, left - 1, -1):
            m, z, acc, p = turn(
                m, z, acc, p, q, shared, where, i, tile, unit, half, HEADS, GROUP, EXTENT, WINDOW,
                True, WINDOW == 0, WINDOW > 0, False,
            )  # fmt: skip
            i += 1
        if WINDOW == 0:
            for tile in range(left - 1, begin - 1, -1):
                m, z, acc, p = turn(
                    m, z, acc, p, q, shared, where, i, tile, unit, half, HEADS, GROUP, EXTENT,
                    WINDOW, False, False, False, False,
                )  # fmt: skip
                i += 1
        last = (i - 1) & 1
        mbarrier.wait(v_full.index(last), ((i - 1) >> 1) & 1)
        acc = warpgroup_mma(p, v_smem.index(last), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        acc = acc / gl.where(z > 0, z, 1.0)[:, None]
        q.store(acc.to(gl.bfloat16))
        barrier()
        done = q.load(ROWS)
        r = gl.arange(0, HALF, layout=gl.SliceLayout(1, ROWS))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, ROWS))
        later = r // GROUP * 8
        at = later * out_t + (r % GROUP) * out_h
        gl.store(out + at[:, None] + d[None, :], done, mask=(later < where[3])[:, None])


@gluon.jit(do_not_specialize=["rows", "batch", "few", "pages_b"])
def attend_hopper(
    q, k_tiles, v_tiles, wide_boxes, spare_boxes, rel, pages, q_starts, kv_lens, out,
    rows, batch, few, scale,
    q_t, q_h, k_page_rows, k_head_rows, k_head_cols, v_page_rows, v_head_rows, v_head_cols,
    pages_b, out_t, out_h,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr,
    PAGE: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """All keys of one tile of 128 rows, for requests with more than `few` new tokens.

    Four tiles share a span of 512 / GROUP tokens: a warpgroup has every eighth of them.
    """
    GROUP: gl.constexpr = HEADS // KV_HEADS
    SPAN: gl.constexpr = 8 * HALF // GROUP
    kv_head = gl.program_id(0) % KV_HEADS
    program = gl.program_id(0) // KV_HEADS
    ids = gl.arange(0, BATCH, layout=LINE)
    real = ids < batch
    counts = gl.load(q_starts + ids + 1, mask=real, other=0)
    counts -= gl.load(q_starts + ids, mask=real, other=0)
    counts = gl.where(counts > few, (counts + SPAN - 1) // SPAN * 4, 0)
    total = gl.sum(counts, 0)
    # Late tiles see the most keys, so they start first; programs without a tile do nothing.
    wanted = gl.maximum(total - 1 - program, 0)
    ends = gl.associative_scan(counts, 0, plus)
    request = gl.minimum(gl.sum((ends <= wanted).to(gl.int32), 0), batch - 1)
    row_tile = wanted - gl.sum(gl.where(ids < request, counts, 0), 0)
    start = gl.load(q_starts + request)
    fresh = gl.load(q_starts + request + 1) - start
    length = gl.load(kv_lens + request)
    used = gl.load(q_starts + batch)
    lead = row_tile // 4 * SPAN
    first = length - fresh + lead
    last = gl.minimum(first + SPAN, length) - 1
    end = gl.where(program < total, (last + N) // N, 0)
    # Tiles from `clear` on need the causal mask: at least the last. Tiles below `edge` reach
    # beyond the window or, without one, beyond the extent; those below `left` wholly.
    begin = end * 0
    reach: gl.constexpr = WINDOW if WINDOW > 0 else EXTENT
    left = gl.maximum(first - reach + 1, 0) // N
    edge = (gl.maximum(last - reach + 1, 0) + N - 1) // N
    if WINDOW > 0:
        begin = gl.minimum(left, end)
    clear = gl.maximum(gl.minimum((first + 1) // N, end - 1), begin)
    ours = row_tile % 4 * 2
    # Rows at the very end, and a box that would begin before the first row. Of these, all tiles
    # with bias take the most general way.
    by_hand = (start + lead + SPAN >= used) | (start + lead + ours == 0)
    clear = gl.where(by_hand, gl.maximum(gl.minimum(left, clear), begin), clear)
    edge = gl.maximum(gl.minimum(edge, clear), begin)
    left = gl.maximum(gl.minimum(left, edge), begin)

    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, D], SWIZZLED)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, N, D], SWIZZLED)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [2, N, D], SWIZZLED)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [4, HALF // GROUP, GROUP, 64], BOX)
    c_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HALF // GROUP, GROUP, SPARE], SPARE_BOX)
    j_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, 64], SWIZZLED)
    h_smem = gl.allocate_shared_memory(gl.bfloat16, [2, SPARE, 64], SWIZZLED)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    b_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    b_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
        mbarrier.init(b_full.index(i), count=1)
        mbarrier.init(b_empty.index(i), count=1)
    r = gl.arange(0, HALF, layout=gl.SliceLayout(1, ROWS))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, ROWS))
    y = gl.arange(0, HALF, layout=gl.SliceLayout(1, PANEL))[:, None]
    above = gl.arange(0, SPARE, layout=gl.SliceLayout(1, PANEL))[:, None]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, PANEL))[None, :]
    for half in gl.static_range(2):
        token = lead + ours + half + r // GROUP * 8
        at = (start + token).to(gl.int64) * q_t + (kv_head * GROUP + r % GROUP) * q_h
        rows_ok = (token < fresh) & (program < total)
        q_smem.index(half).store(
            gl.load(q + at[:, None] + d[None, :], mask=rows_ok[:, None], other=0.0)
        )
        skipped = (first + ours + half + 1) & 7
        per_scale = 1 / scale
        j_smem.index(half).store(
            gl.where(y + column == 63 + skipped, per_scale, 0.0).to(gl.bfloat16)
        )
        h_smem.index(half).store(
            gl.where(above + column == skipped - 1, per_scale, 0.0).to(gl.bfloat16)
        )
    fence_async_shared()
    barrier()

    table = pages + request.to(gl.int64) * pages_b
    unit = scale * LOG2E
    shared = (k_smem, v_smem, b_smem, c_smem, j_smem, h_smem,
              k_full, k_empty, v_full, v_empty, b_full, b_empty)  # fmt: skip
    token = start + lead + ours
    mine = out + token.to(gl.int64) * out_t + kv_head * GROUP * out_h
    near = gl.where(by_hand, end, left)
    place = first + ours
    rest = fresh - lead - ours
    gl.warp_specialize(
        [
            (consume, (q_smem, shared, (rel, token, place, rest, by_hand, kv_head), mine,
                       begin, left, edge, clear, end, length, unit, out_t, out_h, 0,
                       HEADS, GROUP, EXTENT, WINDOW)),
            (consume, (q_smem, shared, (rel, token + 1, place + 1, rest - 1, by_hand, kv_head),
                       mine + out_t, begin, left, edge, clear, end, length, unit,
                       out_t, out_h, 1, HEADS, GROUP, EXTENT, WINDOW)),
            (fetch_keys, (k_tiles, v_tiles, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                          table, begin, end, kv_head * k_head_rows, kv_head * k_head_cols,
                          k_page_rows, kv_head * v_head_rows, kv_head * v_head_cols, v_page_rows,
                          PAGE)),
            (fetch_bias, (wide_boxes, spare_boxes, b_smem, c_smem, b_full, b_empty, token, place,
                          near, end, kv_head, 0, HEADS, GROUP, EXTENT)),
            (fetch_bias, (wide_boxes, spare_boxes, b_smem, c_smem, b_full, b_empty, token + 1,
                          place + 1, near, end, kv_head, 1, HEADS, GROUP, EXTENT)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
    wide = gl.arange(0, D, layout=LINE)
    nothing = gl.zeros([D], gl.bfloat16, LINE)
    for gone in range(used + gl.program_id(0), rows, gl.num_programs(0)):
        for head in range(HEADS):
            gl.store(out + gl.cast(gone, gl.int64) * out_t + head * out_h + wide, nothing)
