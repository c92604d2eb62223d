"""A decode step's gate, routing and sinks in two launches.

The gate's rows and the sinks' gate and up rows are products of the same row, so one launch has
both. Of the programs with gate rows the last to arrive chooses the experts while the others still
read. The sinks' weights are known only then: the second launch multiplies them in where it reads
the activations, which until then are float32, so that they are rounded once and as they were.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton._common import (
    arrivals,
    ceil_div,
    check_rows,
    check_shapes,
    next_power_of_2,
    options,
    order_is_fixed,
    pdl,
    target,
)
from inkling_portable.backends.triton.experts import (
    check_scores,
    gate_logits,
    route,
    route_row,
    sink_experts,
)
from inkling_portable.backends.triton.skinny_linear import (
    gated,
    one_row,
    reading,
    row_sums,
    row_tiling,
)


@triton.jit
def _gated_kernel(
    x, gate, w13, logits, inner, bias, global_scale, weights, ids, gammas, arrived, gate_stride,
    w13_stride, columns, route_scale, H: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    TOP_K: tl.constexpr, EP: tl.constexpr, AP: tl.constexpr, GATES: tl.constexpr,
    EACH: tl.constexpr, BK: tl.constexpr, GATE_EACH: tl.constexpr, GATE_HELD: tl.constexpr,
    ONCE: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATES programs with GATE_EACH rows of the gate, then some with EACH of the sinks' `columns`.

    `arrived` is a zero, and one again at the end.
    """
    program = tl.program_id(0)
    if program < GATES:
        n = program * GATE_EACH + tl.arange(0, GATE_EACH)
        sums = row_sums(
            x, gate, gammas, program * GATE_EACH, E + S, gate_stride, 0, x.dtype.element_ty,
            H, H, GATE_EACH, BK, GATE_HELD, False, ONCE, TOGETHER, PDL,
        )  # fmt: skip
        tl.store(logits + n, sums, mask=n < E + S)
        tl.debug_barrier()
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
        if before == GATES - 1:
            expert = tl.arange(0, EP)
            offset = tl.load(bias + expert, mask=expert < E, other=0.0)
            route_row(
                logits, offset, tl.load(global_scale), weights, ids, gammas, route_scale,
                E, S, TOP_K, EP, AP, ".cg",
            )  # fmt: skip
            tl.store(arrived, 0)
    else:
        first = (program - GATES) * EACH
        gate_up = row_sums(
            x, w13, gammas, first, columns, w13_stride, 0, x.dtype.element_ty,
            H, H, EACH, BK, 1, False, ONCE, TOGETHER, PDL,
        )  # fmt: skip
        i = first // 2 + tl.arange(0, EACH // 2)
        tl.store(inner + i, gated(gate_up, x.dtype.element_ty, EACH), mask=i < columns // 2)


def gate_tiling(hidden: int, each: int, block: int) -> tuple[int, int]:
    """(gate rows of a program, blocks asked for early): on Hopper gates have all of theirs when x
    comes, so that experts are chosen while the sinks' rows are still read."""
    return (1, ceil_div(hidden, block)) if target().arch == "sm90" else (each, 1)


def check_gated(
    x: Tensor, gate: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, w13: Tensor, w2: Tensor
) -> None:  # fmt: skip
    """Raise ValueError for what gated_sinks does not take."""
    check_rows("gated_sinks", x=x, gate=gate, bias=bias, w13=w13, w2=w2)
    check_shapes("gated_sinks", "x TH=, gate GH=, w13 SDH=, w2 SHI=, bias E", x, gate, w13, w2,
                 bias, D=2 * w2.shape[2], G=bias.shape[0] + w13.shape[0])  # fmt: skip
    if not 0 < top_k <= bias.shape[0]:
        raise ValueError(f"gated_sinks: top_k needs 1 to {bias.shape[0]}; found {top_k}")
    check_scores("gated_sinks", bias=bias, global_scale=global_scale)


def gated_sinks(
    x: Tensor, gate: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, route_scale: float,
    w13: Tensor, w2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See the contract. Other than one row: the three ops one after the other."""
    check_gated(x, gate, bias, global_scale, top_k, w13, w2)
    (rows, hidden), (sinks, double, _), experts = x.shape, w13.shape, bias.shape[0]
    if rows != 1 or order_is_fixed():
        logits = gate_logits(x, gate)
        weights, ids, gammas = route(logits, bias, global_scale, top_k, route_scale)
        return logits, weights, ids, sink_experts(x, w13, w2, gammas)
    new = x.new_empty
    logits, weights = (new(1, n, dtype=torch.float32) for n in (experts + sinks, top_k))
    ids, gammas = new(1, top_k, dtype=torch.int32), new(1, sinks, dtype=torch.float32)
    inner = new(1, sinks * double // 2, dtype=torch.float32)
    stacked = w13.reshape(sinks * double, hidden)
    each, block, warps = row_tiling(hidden, sinks * double)
    gate_each, held = gate_tiling(hidden, each, block)
    gates = ceil_div(experts + sinks, gate_each)
    _gated_kernel[(gates + ceil_div(sinks * double, each),)](
        x, gate, stacked, logits, inner, bias, global_scale, weights, ids, gammas,
        arrivals(x.device, "gated_sinks"), gate.stride(0), stacked.stride(0), sinks * double,
        route_scale,
        H=hidden, E=experts, S=sinks, TOP_K=top_k, EP=next_power_of_2(experts),
        AP=next_power_of_2(top_k + sinks), GATES=gates, EACH=each, BK=block,
        GATE_EACH=gate_each, GATE_HELD=held, PDL=pdl(), **reading(),
        **options(num_warps=warps),
    )  # fmt: skip
    out = torch.empty_like(x)
    one_row(inner, w2, out, w2.stride(0), double // 2, gammas=gammas)
    return logits, weights, ids, out
