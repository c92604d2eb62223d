"""vLLM's own NVIDIA kernels, called in place: its attention, its FA4 fork and its exchange of rows.

The only file of this folder that imports vLLM, and only inside functions: a table row may name it
where no vLLM is.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from inkling_portable.backends.triton.rel_attention_tuning import power_of_two
from inkling_portable.backends.triton.short_conv import conv_residual_norm as portable
from inkling_portable.registry import Facts, Gather
from inkling_portable.target import Target

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


MOST_ROWS = 2048
"""Rows for which vLLM's exchange gets memory, 75 MB a rank per 1,024; longer steps are Triton's."""
_exchanges: dict[str, Any] = {}


def prepare(target: Target, facts: Facts, group: str, gather: Gather) -> str | None:
    """Let vLLM map the ranks' memories; all ranks call it. It exchanges in its own TP group.

    Its set-up waits for every rank, so they first vote on what each can know by itself.
    """
    if group in _exchanges:
        return None
    made, reason = None, None
    try:
        made = import_module("vllm.models.inkling.nvidia.ops.lamport").LamportRSConv
        wanted = 2 * 3 * MOST_ROWS * facts.hidden * 2  # in and out, three generations, bfloat16
        if torch.cuda.is_available() and (free := torch.cuda.mem_get_info()[0]) < wanted:
            reason = f"needs {wanted >> 20} MiB of free GPU memory; found {free >> 20}"
    except Exception as error:  # whatever it is, no rank may begin
        reason = f"vLLM's exchange cannot be loaded ({type(error).__name__}: {error})"
    if any(gather(reason)) or made is None:
        return reason
    _exchanges[group] = made(facts.hidden, facts.conv_taps, MOST_ROWS)
    return None


def conv_residual_norm(
    partial: Tensor, extra: Tensor | None, residual: Tensor, conv_weight: Tensor,
    norm_weight: Tensor | None, eps: float, state: Tensor, slots: Tensor, sources: Tensor,
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The contract of the same name, by vLLM's exchange; padding rows keep their residual."""
    if not group or not 0 < partial.shape[0] <= MOST_ROWS:
        return portable(partial, extra, residual, conv_weight, norm_weight, eps, state, slots,
                        sources, group)  # fmt: skip
    positions, pages = as_positions(slots, sources, state.shape[1])
    run = _exchanges[group].rs_sconv_ag_add_norm
    more: dict[str, Tensor] = {}
    # 0.26 takes one partial sum; a later one adds the second where it publishes.
    if extra is not None and "shared_tensor" in signature(run).parameters:
        more["shared_tensor"] = extra
    elif extra is not None:
        partial = partial + extra
    rows = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
    normed, summed = run(
        partial, residual, conv_weight, norm_weight, eps, state.transpose(1, 2), positions, pages,
        rows, slots, 0, state.shape[3], state.shape[1], **more,
    )  # fmt: skip
    return summed[:0] if normed is None else normed, summed


def as_positions(slots: Tensor, sources: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Positions [T] int64 and pages [T, 2] int32, a request for each row, in place of sources.

    Earlier taps lie in the row's own block or in one before it. A row with fewer than three of them
    is that near to its request's start, so its place in the block is its position.
    """
    at = torch.where(sources >= 0, slots[sources.clamp_min(0)], -2 - sources)
    whole = (sources != -1).all(1)
    own = slots.clamp_min(0) // block
    before = torch.where(whole, at[:, 0] // block, own)
    return slots.clamp_min(0) % block + whole * block, torch.stack([before, own], 1).int()
