"""vLLM's own AMD kernels, called in place; the only file of this folder that imports vLLM."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

PAGES = (64, 128, 256)  # tokens; a tile of vLLM's Gluon kernels is a page
LONG = 8192  # from this bound on, vLLM takes its Gluon kernel for chunks of global layers


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
    """The contract of the same name, by the kernel that vLLM picks for the call."""
    if (k_scale, v_scale) != (1, 1):
        raise ValueError(f"k_scale and v_scale need to be 1 for vLLM's kernel; found {k_scale} and "
                         f"{v_scale}, so use rel_attention=triton")  # fmt: skip
    tree = import_module("vllm.models.inkling.amd.ops.fa4_rel_attention")
    out.zero_()  # rows that no request owns
    tree.inkling_fa4_rel_attention(
        q, k_cache, v_cache, block_table=pages, cache_seqlens=kv_lens, cu_seqlens_q=q_starts,
        max_seqlen_q=max_q, softmax_scale=scale, causal=True,
        window_size=(window - 1, 0) if window else (-1, -1), rel_extent=rel.shape[2],
        rel_logits=rel, max_kv_len=max_kv, out=out,
    )  # fmt: skip


def decodes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> bool:  # fmt: skip
    """Whether vLLM would take its Gluon kernel for single new tokens; host integers only."""
    return max_q == 1 and k_cache.shape[1] in PAGES and k_scale == v_scale == 1


def extends(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> bool:  # fmt: skip
    """Whether vLLM would take its Gluon kernel for chunks; host integers only."""
    long = max_q > 1 and max_kv >= LONG and not window
    return long and k_cache.shape[1] in PAGES and k_scale == v_scale == 1


def gluon_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """The contract of rel_attention for `decodes`, by vLLM's Gluon kernel for gfx950.

    It takes row i for request i, which neither padding nor a request without tokens allows: each
    row gets the table and the length of its request, and rows of none have no keys and become 0.
    """
    tree = import_module("vllm.models.inkling.amd.ops.gluon.rel_mha_decode_gfx950")
    row = torch.arange(q.shape[0], device=q.device, dtype=q_starts.dtype)
    owner = torch.searchsorted(q_starts[1:], row, right=True)
    owned = owner < kv_lens.shape[0]
    owner = owner.clamp_max(kv_lens.shape[0] - 1)
    tree.gluon_rel_mha_decode_gfx950(
        q, k_cache, v_cache, pages[owner].contiguous(), torch.where(owned, kv_lens[owner], 0),
        max_kv, rel, q_starts, max_seqlen_q=1, window_left=window - 1 if window else -1,
        softmax_scale=scale, out=out,
    )  # fmt: skip
    out.masked_fill_(~owned[:, None, None], 0)


def gluon_extend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rel: Tensor, pages: Tensor, q_starts: Tensor,
    kv_lens: Tensor, max_q: int, max_kv: int, window: int, scale: float, out: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """The contract of rel_attention for `extends`, by vLLM's Gluon kernel for gfx950."""
    tree = import_module("vllm.models.inkling.amd.ops.gluon.rel_mha_extend_gfx950")
    out.zero_()  # rows that no request owns
    tree.gluon_rel_mha_extend_gfx950(
        q, q_starts, q_starts, k_cache, v_cache, pages, kv_lens, window_left=-1,
        max_seqlen_q=max_q, max_seqlen_k=max_kv, rel_logits=rel, softmax_scale=scale, out=out,
    )  # fmt: skip
