"""Contracts of attention: qkvr_prep and rel_attention."""

from typing import Any

import torch
from torch import Tensor

from inkling_portable.backends.reference._common import acc, rms, store
from inkling_portable.backends.reference.batch import draw_batch, draw_pages, poison
from inkling_portable.backends.reference.short_conv import causal_conv, sources_of
from inkling_portable.inputs import Draw
from inkling_portable.numerics import exact, within_twice_baseline
from inkling_portable.registry import op

DTYPES = (torch.float32, torch.bfloat16)
# Query heads per KV head times KV heads; ratios 1, 4, 8 and 16.
HEADS = ((1, 1), (2, 2), (4, 1), (8, 2), (8, 1), (16, 1))
# At most this many scores exist at once on the reference path (32 MiB in float32).
SCORE_BUDGET = 1 << 23
TILE = 1024
# Keys and values may be stored in eight bits. gfx942 has float8_e4m3fnuz in place of the other,
# with half the range; a cache of it is drawn where tests ask for one.
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def _cache_kind(draw: Draw, dtype: torch.dtype) -> tuple[torch.dtype, float, float]:
    """(type of the caches, k_scale, v_scale); scales belong to 8-bit caches."""
    stored = draw.choice((dtype, FP8[0]))
    if stored in FP8:
        return stored, draw.choice((1.0, 0.75, 0.011)), draw.choice((1.0, 0.3, 0.01))
    return stored, 1.0, 1.0


def _prep_inputs(draw: Draw) -> dict[str, Any]:
    dtype, batch = draw.choice(DTYPES), draw_batch(draw)
    (heads, kv_heads), width = draw.choice(HEADS), draw.choice((16, 64, 128))
    d_rel, extent, taps = draw.choice((8, 16)), draw.choice((16, 40, 128)), 4
    conv = draw_pages(draw, batch, page=draw.choice((4, 8, 5)), window=4, share=True)
    kv = draw_pages(draw, batch, page=draw.choice((16, 64, 128)))
    total = heads * (width + d_rel) + 2 * kv_heads * width
    stored, k_scale, v_scale = _cache_kind(draw, dtype)
    return {
        "qkvr": poison(draw.tensor((batch.rows, total), dtype), batch),
        "k_conv": draw.tensor((kv_heads * width, taps), dtype),
        "v_conv": draw.tensor((kv_heads * width, taps), dtype),
        "q_norm": draw.tensor((width,), dtype, "gain"),
        "k_norm": draw.tensor((width,), dtype, "gain"),
        "rel_proj": draw.tensor((d_rel, extent), dtype),
        "eps": 1e-6,
        "log_floor": draw.choice((0.0, 24.0)),
        "log_alpha": 0.1,
        "k_state": conv.cache(draw, kv_heads, width, dtype),
        "v_state": conv.cache(draw, kv_heads, width, dtype),
        "conv_slots": conv.slots,
        "conv_sources": sources_of(batch, conv, taps),
        "k_cache": kv.cache(draw, kv_heads, width, stored),
        "v_cache": kv.cache(draw, kv_heads, width, stored),
        "kv_slots": kv.slots,
        "positions": batch.positions,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }


@op(
    inputs=_prep_inputs,
    tolerance=(within_twice_baseline(), within_twice_baseline(), exact(), exact(),
               within_twice_baseline(), within_twice_baseline()),
    mutates=("k_state", "v_state", "k_cache", "v_cache"),
)  # fmt: skip
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
    """From the fused projection to attention's inputs and caches (spec 2.2, steps 3 to 6).

    qkvr [T, Hq*D + 2*Hkv*D + Hq*d_rel], order q, k, v, r; k_conv, v_conv [Hkv*D, K]; q_norm,
    k_norm [D]; rel_proj [d_rel, Ext]; k_state, v_state [blocks, block, Hkv, D]; k_cache, v_cache
    [pages, page, Hkv, D]; conv_slots, kv_slots, positions [T] int64; conv_sources [T, K - 1] as in
    the conv contract. log_floor 0 turns the log-length gain off, else q and rel are multiplied by
    1 + log_alpha * ln(max((p+1)/floor, 1)).
    -> (q [T, Hq, D], rel [T, Hq, Ext]). The caches get the convolved, normed key and the convolved
    value, each over its scale; 8-bit caches saturate at their largest number.
    """
    rows, d_rel = qkvr.shape[0], rel_proj.shape[0]
    kv_heads, width = k_cache.shape[2], q_norm.shape[0]
    heads = (qkvr.shape[1] - 2 * kv_heads * width) // (width + d_rel)
    q, k, v, r = qkvr.split(
        [heads * width, kv_heads * width, kv_heads * width, heads * d_rel], dim=1
    )
    k = causal_conv(k, k_conv, k_state, conv_slots, conv_sources)
    v = causal_conv(v, v_conv, v_state, conv_slots, conv_sources)
    q = rms(q.reshape(rows, heads, width), q_norm, eps)
    k = rms(k.reshape(rows, kv_heads, width), k_norm, eps)
    rel = store(acc(r.reshape(rows, heads, d_rel)) @ acc(rel_proj), qkvr)
    if log_floor > 0:
        q, rel = (_log_gain(x, positions, log_floor, log_alpha) for x in (q, rel))
    write = kv_slots >= 0
    page, offset = kv_slots[write] // k_cache.shape[1], kv_slots[write] % k_cache.shape[1]
    k_cache[page, offset] = _cached(k[write], k_scale, k_cache.dtype)
    v_cache[page, offset] = _cached(v.view(rows, kv_heads, width)[write], v_scale, v_cache.dtype)
    return q, rel


def _cached(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale as a cache of `dtype` holds it, nearest even; scales belong to 8-bit caches."""
    if dtype in FP8:
        most = torch.finfo(dtype).max
        return (acc(x) / scale).clamp(-most, most).to(dtype)
    return x.to(dtype) if scale == 1 else (acc(x) / scale).to(dtype)


def _log_gain(x: Tensor, positions: Tensor, floor: float, alpha: float) -> Tensor:
    wide = acc(x)
    steps = (positions + 1).to(wide.dtype) / floor
    gain = 1 + alpha * torch.log(steps.clamp_min(1))
    return store(wide * gain[:, None, None], x)


def _attention_inputs(draw: Draw) -> dict[str, Any]:
    dtype, batch = draw.choice(DTYPES), draw_batch(draw, max_context=300, max_new=70)
    (heads, kv_heads), width = draw.choice(HEADS), draw.choice((16, 64, 128))
    window, extent = draw.choice(((0, 40), (16, 16), (0, 128), (48, 48), (48, 16), (20, 64)))
    paged = draw_pages(draw, batch, page=draw.choice((16, 64, 128)), window=window)
    shape = (batch.rows, heads, width)
    stored, k_scale, v_scale = _cache_kind(draw, dtype)

    def filled(scale: float) -> Tensor:
        cache = paged.cache(draw, kv_heads, width, stored)
        return _filled(cache, scale, paged.pages, batch.kv_lens)

    return {
        "q": poison(draw.tensor(shape, dtype), batch),
        "k_cache": filled(k_scale),
        "v_cache": filled(v_scale),
        "rel": poison(draw.tensor((batch.rows, heads, extent), dtype), batch),
        "pages": paged.pages,
        "q_starts": batch.q_starts,
        "kv_lens": batch.kv_lens,
        "max_q": max([0, *batch.lengths]) + draw.choice((0, 3)),
        "max_kv": int(max([0, *batch.kv_lens.tolist()])) + draw.choice((0, 100)),
        "window": window,
        "scale": 1 / width,
        "out": torch.full(shape, float("nan"), dtype=dtype),
        "k_scale": k_scale,
        "v_scale": v_scale,
    }


def _filled(cache: Tensor, scale: float, pages: Tensor, kv_lens: Tensor) -> Tensor:
    """Numbers over their scale, and NaN in every row that no request owns.

    Those are the null page and the last pages' tails too.
    """
    if scale != 1:
        most = torch.finfo(cache.dtype).max
        cache.copy_((cache.float() / scale).clamp(-most, most))
    used = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for table, length in zip(pages.tolist(), kv_lens.tolist(), strict=True):
        for i, page in enumerate(table):
            used[page, : max(0, min(cache.shape[1], length - i * cache.shape[1]))] = True
    used[0] = False
    spare = cache[~used]
    cache[~used] = torch.full(spare.shape, float("nan")).to(cache.dtype)
    return cache


@op(
    inputs=_attention_inputs,
    tolerance=within_twice_baseline(approximates="powers of two that a GPU approximates"),
    mutates=("out",),
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
    """Causal attention over paged keys, with a learnt bias on near distances (spec 2.2).

    q, out [T, Hq, D]; k_cache, v_cache [pages, page, Hkv, D], any strides; rel [T, Hq, Ext];
    pages [B, P] int32; q_starts [B + 1] int32; kv_lens [B] int32, new tokens included; max_q and
    max_kv bound a request's new tokens and its length. window 0 means no window, else keys at
    distance 0 .. window-1 are visible and older pages may be freed. The bias is added after
    scaling, and is 0 beyond the extent. Rows past q_starts[B] get 0. Caches have the type of q or
    one of FP8, whose numbers times k_scale and v_scale are the keys and values.
    """
    factors = scale * k_scale, v_scale
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    alone = [b for b in range(len(lengths)) if starts[b + 1] - starts[b] == 1]
    step = max(1, SCORE_BUDGET // max(1, q.shape[1] * max(lengths, default=0)))
    for i in range(0, len(alone), step):
        chosen = alone[i : i + step]
        last = kv_lens[chosen].long() - 1
        low = (last - (window - 1)).clamp_min(0) if window else torch.zeros_like(last)
        # Where a request has fewer keys than its neighbours, its last one is repeated, unseen.
        span = torch.arange(int((last - low).max()) + 1, device=q.device)
        positions = (low[:, None] + span).minimum(last[:, None])
        delta = (last[:, None] - low[:, None] - span)[:, None]
        rows = [starts[b] for b in chosen]
        keys, values = (_gather(c, pages[chosen], positions) for c in (k_cache, v_cache))
        mixed = _attend(q[rows][:, None], keys, values, rel[rows][:, None], delta, window, *factors)
        out[rows] = mixed[:, 0]
    for b, length in enumerate(lengths):
        first, stop = starts[b], starts[b + 1]
        if stop - first < 2:
            continue
        before = length - (stop - first)
        oldest = max(0, before - (window - 1)) if window else 0
        positions = torch.arange(oldest, length, device=q.device)
        keys, values = (_gather(c, pages[b : b + 1], positions[None]) for c in (k_cache, v_cache))
        # With a window, a tile of at most TILE queries sees only that many keys beside it.
        span = min(length, TILE + window) if window else length
        tile = min(TILE, max(1, SCORE_BUDGET // (q.shape[1] * span)))
        for row in range(first, stop, tile):
            end = min(stop, row + tile)
            start = max(0, before + row - first - (window - 1)) if window else 0
            seen = slice(start - oldest, before + end - first - oldest)
            queries = torch.arange(before + row - first, before + end - first, device=q.device)
            # Leading keys that no query of the tile is near to need neither bias nor mask.
            far = 0 if window else max(0, before + row - first - rel.shape[-1] + 1)
            delta = queries[:, None] - positions[seen][far:]
            out[row:end] = _attend(
                q[None, row:end], keys[:, seen], values[:, seen], rel[None, row:end],
                delta[None], window, *factors,
            )[0]  # fmt: skip
    out[starts[-1] :] = 0


def _gather(cache: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """cache [pages, page, Hkv, D]; tables [B, P]; positions [B, m] -> rows [B, m, Hkv, D]."""
    page = cache.shape[1]
    return cache[tables.gather(1, positions // page), positions % page]


def _attend(q: Tensor, keys: Tensor, values: Tensor, rel: Tensor, delta: Tensor, window: int,
            scale: float, v_scale: float) -> Tensor:  # fmt: skip
    """q [B, n, Hq, D]; keys, values [B, m, Hkv, D]; rel [B, n, Hq, Ext] -> [B, n, Hq, D].

    delta [B, n, up to m] is about the last keys; those before them are visible without a bias.
    """
    batch, rows, heads, width = q.shape
    kv_heads, extent = keys.shape[2], rel.shape[-1]
    grouped = acc(q).transpose(1, 2).reshape(batch, kv_heads, -1, width)
    keys, values = (acc(x).to(grouped.dtype).transpose(1, 2) for x in (keys, values))
    scores = (grouped @ keys.transpose(2, 3)).view(batch, heads, rows, -1) * scale
    delta = delta[:, None]
    near = delta.clamp(0, extent - 1).expand(-1, heads, -1, -1)
    bias = acc(rel).transpose(1, 2).gather(3, near).to(scores.dtype)
    hidden = (delta < 0) | (delta >= window) if window else delta < 0
    close = scores[..., scores.shape[-1] - delta.shape[-1] :]
    close += bias.masked_fill_((delta < 0) | (delta >= extent), 0)
    close.masked_fill_(hidden, float("-inf"))
    weights = store(scores.softmax(-1), q)
    mixed = (acc(weights).view(batch, kv_heads, -1, weights.shape[-1]) @ values) * v_scale
    return store(mixed.view(batch, heads, rows, width).transpose(1, 2), q)
