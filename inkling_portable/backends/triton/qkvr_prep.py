"""From the fused projection to attention's inputs and caches, in one launch.

The grid is one list of programs in four roles: query norms, keys (conv, norm, cache), values (conv,
cache) and tiles of the relative projection. An item is one head of one token; each role takes its
items in blocks, small ones at decode, so that a single token already spreads over many programs.
Every state row that is read is older than the step and every row that is written belongs to it, so
programs need no order. For the same reason few rows are read from the state before what runs before
ends; slots, sources and positions are to be there as for `short_conv`.
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
    compute_units,
    is_rocm,
    next_power_of_2,
    options,
    order_is_fixed,
    pdl,
    target,
)
from inkling_portable.backends.triton.short_conv import load_weight, packed_taps, tap_weight


@triton.jit
def _gain(positions, token, mask, floor, alpha):
    """The log-length gain of each item's position, float32."""
    position = tl.load(positions + token, mask=mask, other=0)
    steps = (position + 1).to(tl.float32) / floor
    return 1.0 + alpha * tl.log(tl.maximum(steps, 1.0))


@triton.jit
def _head_norm(tile, gain, D: tl.constexpr, eps):
    """RMS norm of the rows of a float32 tile [items, DP], zero past column D."""
    square = tl.sum(tile * tile, axis=1) / D
    return tile * tl.rsqrt(square + eps)[:, None] * gain[None, :]


@triton.jit
def _from_state(state, at, wanted, in_state, page, stride_b, stride_t):
    """Rows of the state, zeros where a tap is none of these."""
    slot = tl.maximum(-2 - at, 0)
    cell = (slot // page) * stride_b + (slot % page) * stride_t
    return tl.load(state + cell[:, None] + in_state, mask=(at < -1)[:, None] & wanted, other=0.0)


@triton.jit
def _kv_role(
    block_index, source, weight, state, cache, norm, qkvr_stride, weight_stride_c, weight_stride_k,
    state_stride_b, state_stride_t, state_stride_g, state_stride_w, cache_stride_p, cache_stride_t,
    cache_stride_h, cache_stride_d, conv_slots, sources, conv_page, kv_slots, kv_page, rows, eps,
    scale, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TAPS: tl.constexpr,
    ITEMS: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr, MOST: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve ITEMS heads of keys or values, write their state and their cache rows.

    MOST is 0, or the largest number of a cache in 8 bits, which gets values over `scale`.
    """
    item = block_index.to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    token, head = item // HKV, item % HKV
    live = token < rows
    column = tl.arange(0, DP)
    mask = live[:, None] & (column < D)[None, :]
    conv_slot = tl.load(conv_slots + token, mask=live, other=-1)
    kv_slot = tl.load(kv_slots + token, mask=live, other=-1)
    channel = head[:, None] * D + column[None, :]
    here = source + token[:, None] * qkvr_stride + channel
    kernel = load_weight(weight, channel, mask, weight_stride_c, weight_stride_k, TAPS - 1, PACKED)
    if NORM:
        gain = tl.load(norm + column, mask=column < D, other=0.0).to(tl.float32)
    real = conv_slot >= 0
    in_state = head[:, None] * state_stride_g + column[None, :] * state_stride_w
    older = ()
    if EARLY:
        for back in tl.static_range(1, TAPS):
            at = tl.load(sources + token * (TAPS - 1) + TAPS - 1 - back, mask=live, other=-1)
            value = _from_state(
                state, at, real[:, None] & mask, in_state, conv_page, state_stride_b, state_stride_t
            )
            older = older + (value,)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    z = tl.load(here, mask=mask, other=0.0)
    wide = z.to(tl.float32)
    total = wide + tl.where(real[:, None], wide * tap_weight(kernel, PACKED, TAPS - 1), 0.0)
    for back in tl.static_range(1, TAPS):
        at = tl.load(sources + token * (TAPS - 1) + TAPS - 1 - back, mask=live, other=-1)
        from_step = (real & (at >= 0))[:, None] & mask
        place = source + tl.maximum(at, 0)[:, None] * qkvr_stride + channel
        before = tl.load(place, mask=from_step, other=0.0)
        if not EARLY:
            cached = _from_state(
                state, at, real[:, None] & mask, in_state, conv_page, state_stride_b, state_stride_t
            )
        else:
            cached = older[back - 1]
        # One of the two is zero: they never speak for the same row.
        tap = before.to(tl.float32) + cached.to(tl.float32)
        if PACKED:
            factor = tap_weight(kernel, True, TAPS - 1 - back)
        else:
            factor = load_weight(
                weight, channel, mask, weight_stride_c, weight_stride_k, TAPS - 1 - back, False
            ).to(tl.float32)
        total += tap * factor
    write = tl.maximum(conv_slot, 0)
    cell = (write // conv_page) * state_stride_b + (write % conv_page) * state_stride_t
    tl.store(state + cell[:, None] + in_state, z, mask=(conv_slot >= 0)[:, None] & mask)
    y = total.to(z.dtype)
    if NORM:
        y = _head_norm(y.to(tl.float32), gain, D, eps).to(z.dtype)
    write = tl.maximum(kv_slot, 0)
    cell = (write // kv_page) * cache_stride_p + (write % kv_page) * cache_stride_t
    place = cell[:, None] + head[:, None] * cache_stride_h + column[None, :] * cache_stride_d
    if MOST > 0:
        y = y.to(tl.float32) / scale
        every: tl.constexpr = tl.PropagateNan.ALL
        y = tl.maximum(tl.minimum(y, MOST, propagate_nan=every), -MOST, propagate_nan=every)
    tl.store(cache + place, y.to(cache.dtype.element_ty), mask=(kv_slot >= 0)[:, None] & mask)


@triton.jit
def _query_role(
    block_index, qkvr, norm, out, positions, rows, qkvr_stride, eps, log_floor, log_alpha,
    HQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ITEMS: tl.constexpr, LOG: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm ITEMS query heads."""
    item = block_index.to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    token, head = item // HQ, item % HQ
    live = token < rows
    column = tl.arange(0, DP)
    mask = live[:, None] & (column < D)[None, :]
    place = token[:, None] * qkvr_stride + head[:, None] * D + column[None, :]
    weight = tl.load(norm + column, mask=column < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q = tl.load(qkvr + place, mask=mask, other=0.0)
    y = _head_norm(q.to(tl.float32), weight, D, eps).to(q.dtype).to(tl.float32)
    if LOG:
        y *= _gain(positions, token, live, log_floor, log_alpha)[:, None]
    tl.store(out + item[:, None] * D + column[None, :], y, mask=mask)


@triton.jit
def _relative_role(
    tile, source, proj, out, positions, rows, qkvr_stride, proj_stride, log_floor, log_alpha,
    HQ: tl.constexpr, D_REL: tl.constexpr, RP: tl.constexpr, EXT: tl.constexpr, ITEMS: tl.constexpr,
    COLUMNS: tl.constexpr, LOG: tl.constexpr, EXACT_DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the relative projection: ITEMS heads by COLUMNS distances."""
    across: tl.constexpr = (EXT + COLUMNS - 1) // COLUMNS
    item = (tile // across).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    token, head = item // HQ, item % HQ
    live = token < rows
    inner = tl.arange(0, RP)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.load(
        proj + inner[:, None] * proj_stride + column[None, :],
        mask=(inner < D_REL)[:, None] & (column < EXT)[None, :],
        other=0.0,
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.load(
        source + token[:, None] * qkvr_stride + head[:, None] * D_REL + inner[None, :],
        mask=live[:, None] & (inner < D_REL)[None, :],
        other=0.0,
    )
    if EXACT_DOT:
        y = tl.dot(r, p, input_precision="ieee")
    else:
        y = tl.dot(r, p)
    y = y.to(r.dtype).to(tl.float32)
    if LOG:
        y *= _gain(positions, token, live, log_floor, log_alpha)[:, None]
    mask = live[:, None] & (column < EXT)[None, :]
    tl.store(out + item[:, None] * EXT + column[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["rows", "q_blocks", "kv_blocks"])
def _prep_kernel(
    qkvr, k_conv, v_conv, q_norm, k_norm, rel_proj, k_state, v_state, k_cache, v_cache, conv_slots,
    conv_sources, kv_slots, positions, q_out, rel_out, rows, q_blocks, kv_blocks, conv_page,
    kv_page, qkvr_stride, k_conv_stride_c, k_conv_stride_k, v_conv_stride_c, v_conv_stride_k,
    k_state_b, k_state_t, k_state_g, k_state_w, v_state_b, v_state_t, v_state_g, v_state_w,
    k_cache_p, k_cache_t, k_cache_h, k_cache_d, v_cache_p, v_cache_t, v_cache_h, v_cache_d,
    proj_stride, eps, log_floor, log_alpha, k_scale, v_scale, HQ: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, D_REL: tl.constexpr, RP: tl.constexpr, EXT: tl.constexpr,
    TAPS: tl.constexpr, Q_ITEMS: tl.constexpr, KV_ITEMS: tl.constexpr, REL_ITEMS: tl.constexpr,
    REL_COLUMNS: tl.constexpr, PACKED: tl.constexpr, LOG: tl.constexpr, EXACT_DOT: tl.constexpr,
    MOST: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    if index < kv_blocks:
        _kv_role(
            index, qkvr + HQ * D, k_conv, k_state, k_cache, k_norm,
            qkvr_stride, k_conv_stride_c, k_conv_stride_k,
            k_state_b, k_state_t, k_state_g, k_state_w,
            k_cache_p, k_cache_t, k_cache_h, k_cache_d,
            conv_slots, conv_sources, conv_page, kv_slots, kv_page, rows, eps, k_scale,
            HKV, D, DP, TAPS, KV_ITEMS, PACKED, True, MOST, EARLY, PDL,
        )  # fmt: skip
    elif index < 2 * kv_blocks:
        _kv_role(
            index - kv_blocks, qkvr + (HQ + HKV) * D, v_conv, v_state, v_cache, k_norm,
            qkvr_stride, v_conv_stride_c, v_conv_stride_k,
            v_state_b, v_state_t, v_state_g, v_state_w,
            v_cache_p, v_cache_t, v_cache_h, v_cache_d,
            conv_slots, conv_sources, conv_page, kv_slots, kv_page, rows, eps, v_scale,
            HKV, D, DP, TAPS, KV_ITEMS, PACKED, False, MOST, EARLY, PDL,
        )  # fmt: skip
    elif index < 2 * kv_blocks + q_blocks:
        _query_role(
            index - 2 * kv_blocks, qkvr, q_norm, q_out, positions, rows, qkvr_stride,
            eps, log_floor, log_alpha, HQ, D, DP, Q_ITEMS, LOG, PDL,
        )  # fmt: skip
    else:
        _relative_role(
            index - 2 * kv_blocks - q_blocks, qkvr + (HQ + 2 * HKV) * D, rel_proj, rel_out,
            positions, rows, qkvr_stride, proj_stride, log_floor, log_alpha,
            HQ, D_REL, RP, EXT, REL_ITEMS, REL_COLUMNS, LOG, EXACT_DOT, PDL,
        )  # fmt: skip


def tiling(rows: int, heads: int, extent: int) -> tuple[int, int, int, int, int]:
    """(query items, kv items, relative items, relative columns, warps) of one program.

    Few rows: small blocks, so that every unit has work. Many rows: blocks that fill a program.
    """
    columns = min(128, next_power_of_2(extent))
    if order_is_fixed() or rows * heads > 16 * compute_units():
        if target().vendor == "cpu":  # the interpreter pays by the operation, not by its size
            return 64, 32, 64, columns, 4
        if target().arch == "sm90":
            return (8, 2, 32, 128, 2) if extent > 512 else (16, 8, 32, 2 * columns, 4)
        return 16, 4, 64, columns, 4
    return 4, 1, 16, columns, 2 if is_rocm() else 4


def qkvr_prep(
    qkvr: Tensor,
    k_conv: Tensor,
    v_conv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rel_proj: Tensor,
    eps: float,
    log_floor: float,
    log_alpha: float,
    k_state: Tensor,
    v_state: Tensor,
    conv_slots: Tensor,
    conv_sources: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_slots: Tensor,
    positions: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    check_rows("qkvr_prep", qkvr=qkvr, q_norm=q_norm, k_norm=k_norm, rel_proj=rel_proj,
               conv_slots=conv_slots, conv_sources=conv_sources, kv_slots=kv_slots,
               positions=positions)  # fmt: skip
    rows, (d_rel, extent) = qkvr.shape[0], rel_proj.shape
    kv_heads, width = k_cache.shape[2], q_norm.shape[0]
    check_shapes(
        "qkvr_prep", "qkvr TC=, q_norm D, k_norm D, rel_proj RE=, k_cache PBHD, v_cache PBHD, "
        "k_state XYHD=, v_state ZYHD=, conv_slots T, kv_slots T, positions T, k_conv NK, "
        "v_conv NK, conv_sources TS", qkvr, q_norm, k_norm, rel_proj, k_cache, v_cache, k_state,
        v_state, conv_slots, kv_slots, positions, k_conv, v_conv, conv_sources,
        N=kv_heads * width, S=k_conv.shape[1] - 1,
    )  # fmt: skip
    heads = (qkvr.shape[1] - 2 * kv_heads * width) // (width + d_rel)
    if heads * (width + d_rel) + 2 * kv_heads * width != qkvr.shape[1]:
        raise ValueError(f"qkvr_prep: qkvr has {qkvr.shape[1]} columns, which no head count of "
                         f"width {width} + {d_rel} gives with {kv_heads} kv heads; pass q, k, v, r "
                         "in this order")  # fmt: skip
    if k_cache.dtype != v_cache.dtype:
        raise ValueError("qkvr_prep: keys and values need caches of one type; found "
                         f"{k_cache.dtype} and {v_cache.dtype}")  # fmt: skip
    if k_cache.dtype.itemsize > 1 and (k_scale, v_scale) != (1, 1):
        raise ValueError(f"qkvr_prep: scales need 8-bit caches; found {k_scale:g} and {v_scale:g} "
                         f"for {k_cache.dtype}")  # fmt: skip
    q = torch.empty(rows, heads, width, dtype=qkvr.dtype, device=qkvr.device)
    rel = torch.empty(rows, heads, extent, dtype=qkvr.dtype, device=qkvr.device)
    if rows == 0:
        return q, rel
    packed = packed_taps(k_conv) and packed_taps(v_conv)
    q_items, kv_items, rel_items, rel_columns, warps = tiling(rows, heads, extent)
    q_blocks = ceil_div(rows * heads, q_items)
    kv_blocks = ceil_div(rows * kv_heads, kv_items)
    rel_blocks = ceil_div(rows * heads, rel_items) * ceil_div(extent, rel_columns)
    _prep_kernel[(2 * kv_blocks + q_blocks + rel_blocks,)](
        qkvr, k_conv.view(torch.int64) if packed else k_conv,
        v_conv.view(torch.int64) if packed else v_conv, q_norm, k_norm, rel_proj, k_state, v_state,
        k_cache, v_cache, conv_slots, conv_sources, kv_slots, positions, q, rel, rows, q_blocks,
        kv_blocks, k_state.shape[1], k_cache.shape[1], qkvr.stride(0), *k_conv.stride(),
        *v_conv.stride(), *k_state.stride(), *v_state.stride(), *k_cache.stride(),
        *v_cache.stride(), rel_proj.stride(0), eps, log_floor, log_alpha, k_scale, v_scale,
        HQ=heads, HKV=kv_heads, D=width, DP=next_power_of_2(width), D_REL=d_rel,
        RP=max(16, next_power_of_2(d_rel)), EXT=extent, TAPS=k_conv.shape[1], Q_ITEMS=q_items,
        KV_ITEMS=kv_items, REL_ITEMS=rel_items, REL_COLUMNS=rel_columns, PACKED=packed,
        LOG=log_floor > 0, EXACT_DOT=qkvr.dtype == torch.float32,
        MOST=torch.finfo(k_cache.dtype).max if k_cache.dtype.itemsize == 1 else 0,
        EARLY=kv_items == 1 and not is_rocm(), PDL=pdl(), **options(num_warps=warps),
    )  # fmt: skip
    return q, rel
