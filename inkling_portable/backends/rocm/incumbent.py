"""vLLM's own AMD kernels, called in place; the only file of this folder that imports vLLM."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor


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
