"""vLLM's own NVIDIA kernels, called in place: its relative attention and its FA4 fork.

The only file of this folder that imports vLLM, and only inside functions: a table row may name it
where no vLLM is.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from inkling_portable.backends.triton.rel_attention_tuning import power_of_two

# One function in 0.26, since then an object to call under two names: the same arguments.
KERNELS = ("inkling_fa4_rel_attention", "INKLING_FA4_REL_ATTENTION_KERNEL",
           "_INKLING_FA4_REL_ATTENTION_KERNEL")  # fmt: skip


def flash_attention() -> Callable[..., Any]:
    """FA4 of the engine: variable lengths, paged keys, splits on Hopper (PyPI's refuses them).

    Raises ImportError where vLLM was built without it.
    """
    found: Callable[..., Any] = import_module("vllm.vllm_flash_attn.cute").flash_attn_varlen_func
    return found


def plain(k_scale: float, v_scale: float) -> None:
    """Raise ValueError for a scaled cache, of which FA4 would read other numbers."""
    if (k_scale, v_scale) != (1, 1):
        raise ValueError(f"k_scale and v_scale need to be 1 for FA4; found {k_scale}, {v_scale}; "
                         "use rel_attention=triton")  # fmt: skip


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
    """The contract of the same name, by vLLM's in-tree kernel with the splits that vLLM picks."""
    plain(k_scale, v_scale)
    tree = import_module("vllm.models.inkling.nvidia.ops.fa4_rel_attention")
    heads, kv_heads, longest = q.shape[1], k_cache.shape[2], power_of_two(max_q)
    splits = tree.inkling_fa4_num_splits(
        is_local=window > 0, batch_size=kv_lens.shape[0], max_query_len=longest, num_heads=heads,
        num_kv_heads=kv_heads, max_kv_len=window or max_kv,
    )  # fmt: skip
    run = next(getattr(tree, name) for name in KERNELS if hasattr(tree, name))
    out.zero_()  # rows that no request owns
    run(
        q, k_cache, v_cache, block_table=pages[: kv_lens.shape[0]], cache_seqlens=kv_lens,
        cu_seqlens_q=q_starts, max_seqlen_q=longest, softmax_scale=scale, causal=True,
        window_size=(window - 1, 0) if window else (-1, -1), rel_extent=rel.shape[2],
        rel_logits=rel, num_splits=splits, out=out,
    )  # fmt: skip
