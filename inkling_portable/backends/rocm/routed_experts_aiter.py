"""MXFP4 experts by AITER's Triton GEMM of 16-bit activations, on gfx942 and gfx950.

vLLM refuses this kernel for models with a routing of their own, which Inkling is; the kernel itself
takes a ready table of pairs by expert, so that table is built here. It wants gate and up rows
alternating, as checkpoints store them, and plain SiLU, which AITER has from 0.1.16 on. Blocks have
at most 32 rows: compiled for gfx942 with 64 and 128 its kernel spills.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TALLEST = 32


@dataclass(frozen=True)
class Table:
    """(token, slot) pairs in the order of their experts; E experts, blocks of `block_m` pairs."""

    block_m: int
    counts: Tensor  # int32 [E]
    starts: Tensor  # int32 [E + 1]: first pair of each expert, then the number of pairs
    first_blocks: Tensor  # int32 [E + 1]: the same in blocks
    blocks: (
        Tensor  # int32 [blocks]: expert, and its how manieth block times 2^16; -1 beyond the last
    )
    gather: Tensor  # int32 [pairs]: the pair (token * k + slot) at each place
    scatter: Tensor  # int32 [pairs]: the place of each pair
    weights: Tensor  # float32 [pairs]: the weight at each place


def routing_table(ids: Tensor, weights: Tensor, experts: int) -> Table:
    """ids [T, k] int32, weights [T, k] float32; nothing returns to the host.

    AITER knows no pair without an expert: a foreign id becomes expert 0 with weight 0.
    """
    flat = ids.reshape(-1).long()
    known = (flat >= 0) & (flat < experts)
    flat = torch.where(known, flat, 0)
    pairs = flat.numel()
    block_m = 16 if pairs <= 16 * experts else TALLEST
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0)
    block_ends = ((counts + block_m - 1) // block_m).cumsum(0)
    most = pairs if pairs <= experts else -(-(pairs - experts + 1) // block_m) + experts - 1
    block = torch.arange(most, device=ids.device)
    owner = torch.searchsorted(block_ends, block, right=True)
    before = torch.cat([block_ends.new_zeros(1), block_ends])
    packed = torch.where(owner < experts, owner | (block - before[owner]) << 16, -1)
    scatter = torch.empty_like(order)
    scatter[order] = torch.arange(pairs, device=ids.device)
    return Table(
        block_m,
        counts.int(),
        torch.cat([ends.new_zeros(1), ends]).int(),
        before.int(),
        packed.int(),
        order.int(),
        scatter.int(),
        torch.where(known, weights.reshape(-1), 0.0)[order],
    )


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    w13_global: Tensor | None,
    w2_global: Tensor | None,
    format: str,
    act: str,
    interleaved: bool,
) -> Tensor:
    """See the contract. format is "mxfp4", act "bf16", gate and up rows alternate."""
    for name, found, wanted in (("format", format, "mxfp4"), ("act", act, "bf16"),
                                ("interleaved", interleaved, True)):  # fmt: skip
        if found != wanted:
            raise ValueError(f"routed_experts: provider aiter needs {name} {wanted}; found "
                             f"{found}; ask for routed_experts=triton")  # fmt: skip
    if w13_scale is None or w2_scale is None:
        raise ValueError("routed_experts: format 'mxfp4' needs scales; pass w13_scale, w2_scale")
    if ids.numel() == 0:
        return torch.zeros_like(x)
    gemm, routing = _aiter()
    experts, top_k = w13.shape[0], ids.shape[1]
    table = routing_table(ids, weights, experts)
    data = routing.ExptData(table.counts, table.starts, table.first_blocks, table.blocks)
    routing_data = routing.RoutingData(
        block_m=table.block_m, gate_scal=table.weights, expt_hist=table.counts,
        n_expts_tot=experts, n_expts_act=top_k, expt_data=data,
    )  # fmt: skip
    inner = gemm(
        x, w13.transpose(1, 2), None, w13_scale.view(torch.uint8).transpose(1, 2),
        routing_data=routing_data, gather_indx=table.gather, out_dtype=x.dtype, apply_swiglu=True,
        alpha=1.0, limit=None, swiglu_add_residual=False,
    )  # fmt: skip
    # In float32, so that the sum over experts is rounded once.
    out: Tensor = gemm(
        inner, w2.transpose(1, 2), None, w2_scale.view(torch.uint8).transpose(1, 2),
        routing_data=routing_data, scatter_indx=table.scatter, gammas=table.weights,
        out_dtype=torch.float32,
    )  # fmt: skip
    return out.to(x.dtype)


def _aiter() -> tuple[Any, Any]:
    """(moe_gemm_a16w4, its routing module). Raises RuntimeError if AITER has no plain SiLU."""
    from aiter.ops.triton.moe import moe_op_gemm_a16w4
    from aiter.ops.triton.moe.moe_routing import routing

    gemm = moe_op_gemm_a16w4.moe_gemm_a16w4
    if "swiglu_add_residual" not in inspect.signature(gemm).parameters:
        raise RuntimeError(
            "provider aiter needs moe_gemm_a16w4 with swiglu_add_residual, which this amd-aiter "
            "lacks; install amd-aiter 0.1.16 or newer, or ask for routed_experts=triton"
        )
    return gemm, routing
