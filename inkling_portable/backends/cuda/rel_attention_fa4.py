"""rel_attention by the engine's FA4 fork: long prefills in two parts, all the rest by a modifier.

Beyond the extent there is no bias. The keys at distances >= extent of a long prefill are those of
plain causal attention over a sequence that is `extent` keys shorter, which FA4 does at the chip's
best rate; what it returns, output and log-sum-exp, is where our own kernel starts to fold in the
near keys with their bias. Rows that have no far keys are told by their position: FA4 leaves
arbitrary numbers there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.cuda.incumbent import flash_attention, plain
from inkling_portable.backends.triton import rel_attention as near
from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton._common import target

# FA4 asks the table for the pages of tiles before the first key, and hides what it read there.
LEFT = 16
# From here on the two parts were faster on an H200 than the Triton kernels alone.
LEAST_TOKENS, LEAST_KEYS = 2048, 8192


def long_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> bool:  # fmt: skip
    """Whether `composed` serves a call and pays: host integers only. FA4's tiles are one page."""
    extent = rel.shape[2]
    return (
        window == 0
        and min(max_q, q.shape[0]) >= LEAST_TOKENS
        and max_kv >= max(LEAST_KEYS, 2 * extent)
        and k_cache.shape[1] == 128
        and extent <= 128 * (LEFT - 2)
        and k_cache.dtype == q.dtype
        and k_scale == v_scale == 1
    )


def composed(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """The contract of the same name where `long_prefill` holds."""
    batch, extent = kv_lens.shape[0], rel.shape[2]
    shape = near.describe(q, k_cache, v_cache, rel, kv_lens, max_q, max_kv, window)
    plan = tuning.near_plan(target(), shape)
    columns = min(pages.shape[1], -(-max_kv // k_cache.shape[1]))
    table = torch.empty((batch, LEFT + columns), dtype=torch.int32, device=q.device)
    far_lens = torch.empty_like(kv_lens)
    shift_pages[(batch, triton.cdiv(LEFT + columns, 1024))](
        pages, q_starts, kv_lens, table, far_lens, plan.few_tokens if plan.few else 0, columns,
        pages.stride(0), extent, LEFT=LEFT, BLOCK=1024,
    )  # fmt: skip
    _, far_lse = flash_attention()(
        q, k_cache, v_cache, cu_seqlens_q=q_starts, seqused_k=far_lens,
        max_seqlen_q=tuning.power_of_two(max_q), page_table=table[:, LEFT:], softmax_scale=scale,
        causal=True, return_lse=True, out=out,
    )  # fmt: skip
    near.attend(
        plan, q, k_cache, v_cache, rel, pages, q_starts, kv_lens, max_q, max_kv, window, scale, out,
        far_lse=far_lse,
    )  # fmt: skip


@triton.jit(do_not_specialize=["few", "columns"])
def shift_pages(
    pages, q_starts, kv_lens, table, far_lens, few, columns, pages_b, extent,
    LEFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """table [B, LEFT + columns]: LEFT zeros, then the pages; far_lens [B]: keys without bias.

    Requests of up to `few` new tokens get no far keys: another kernel serves all of theirs.
    """
    request = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK) - LEFT
    page = tl.load(
        pages + tl.cast(request, tl.int64) * pages_b + column,
        mask=(column >= 0) & (column < columns), other=0,
    )  # fmt: skip
    row = table + tl.cast(request, tl.int64) * (LEFT + columns) + LEFT
    tl.store(row + column, page, mask=column < columns)
    if tl.program_id(1) == 0:
        fresh = tl.load(q_starts + request + 1) - tl.load(q_starts + request)
        length = tl.maximum(tl.load(kv_lens + request) - extent, 0)
        tl.store(far_lens + request, tl.where(fresh > few, length, 0))


def modified(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """The contract of the same name for any call, with the bias in FA4's score modifier.

    FA4 multiplies values behind the last key by zero: they must be finite, as a server's are.
    """
    plain(k_scale, v_scale)
    batch = kv_lens.shape[0]
    out.zero_()  # rows that no request owns
    if not q.shape[0] or not batch:
        return
    shape = near.describe(q, k_cache, v_cache, rel, kv_lens, max_q, max_kv, window)
    flash_attention()(
        q, k_cache, v_cache, cu_seqlens_q=q_starts, seqused_k=kv_lens,
        max_seqlen_q=tuning.power_of_two(max_q), page_table=pages[:batch], softmax_scale=scale,
        causal=True, window_size=(window - 1, 0) if window else (None, None),
        num_splits=splits(shape, target().compute_units), score_mod=bias_modifier(rel.shape[2]),
        aux_tensors=[rel], out=out,
    )  # fmt: skip


def splits(shape: tuning.Shape, units: int) -> int:
    """Parts of the keys that fill the chip with one tile of rows each; 128 is FA4's most."""
    tiles = tuning.row_tiles(shape, 128) * shape.kv_heads
    span = min(shape.max_kv, shape.window + shape.max_q) if shape.window else shape.max_kv
    return max(1, min(128, units // tiles, -(-span // 128)))


@cache
def bias_modifier(extent: int) -> Callable[..., Any]:
    """FA4's `score_mod` that adds rel[row, head, distance] to a score; one for each extent."""
    import cutlass
    from cutlass import cute

    # FA4 passes all but the scores by these names.
    @cute.jit
    def add_bias(scores, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = (q_idx + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx)[0]
        row = (q_idx + seqlen_info.offset_q)[0]
        # FA4 hides what lies ahead of a query later; here it only must not be read.
        within = cutlass.min(cutlass.max(distance, 0), extent - 1)
        bias = cutlass.Float32(aux_tensors[0][row, h_idx[0], within])
        bias = bias if distance == within else cutlass.Float32(0.0)
        return scores + bias

    found: Callable[..., Any] = add_bias
    return found
