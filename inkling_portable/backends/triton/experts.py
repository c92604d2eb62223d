"""The feed-forward part around the routed experts: gate, routing, activation, sinks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton._common import (
    ceil_div,
    check_rows,
    check_shapes,
    next_power_of_2,
    options,
    order_is_fixed,
    pdl,
    target,
)
from inkling_portable.backends.triton.skinny_linear import one_row, product

MATMUL_FROM = 65
"""Rows from which sink_experts leaves its two products to the vendor's matrix library."""


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """See the contract. On Hopper the vendor's library takes half our time for many rows, if the
    number of logits is a multiple of eight: it may read some rows of what lies behind `weight`."""
    check_rows("gate_logits", x=x, weight=weight)
    check_shapes("gate_logits", "x TH=, weight EH=", x, weight)
    if x.shape[0] >= MATMUL_FROM and x.is_cuda and target().arch == "sm90" and not order_is_fixed():
        (experts, width), step = weight.shape, weight.stride(0)
        whole = experts + -experts % 8
        end = weight.storage_offset() + (whole - 1) * step + width
        if x.dtype == torch.bfloat16 and 2 * end <= weight.untyped_storage().nbytes():
            columns = weight.as_strided((width, whole), (1, step))
            return torch.mm(x, columns, out_dtype=torch.float32)[:, :experts]
    return product(x, weight, torch.float32)


@triton.jit
def _log_sigmoid(z):
    # Written on both sides of 0 so that neither large nor tiny sigmoids lose digits.
    return tl.minimum(z, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(z)))


@triton.jit
def route_row(
    logits, offset, scale, weights, ids, gammas, route_scale, E: tl.constexpr, S: tl.constexpr,
    TOP_K: tl.constexpr, EP: tl.constexpr, AP: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """One row, each pointer at its own. offset [EP] is the bias, scale the global scale.

    A score and its index travel as one 64-bit key, so a maximum needs one reduction. The high half
    orders the score's bits as integers, the low half is larger for lower indices: ties go to the
    lowest index, and every chosen id is a valid one, for NaN scores too.
    """
    expert = tl.arange(0, EP)
    exists = expert < E
    z = tl.load(logits + expert, mask=exists, other=0.0, cache_modifier=CACHE)
    score = 1.0 / (1.0 + tl.exp(-z)) + offset
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    lowest: tl.constexpr = -(1 << 63)
    key = tl.where(exists, (ordered << 32) | (EP - 1 - expert).to(tl.int64), lowest)
    slot = tl.arange(0, AP)
    active = E + slot - TOP_K  # sinks stand behind the chosen experts
    for i in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        active = tl.where(slot == i, EP - 1 - (best & 0xFFFFFFFF).to(tl.int32), active)
        key = tl.where(key == best, lowest, key)
    used = slot < TOP_K + S
    chosen = tl.load(logits + active, mask=used, other=0.0, cache_modifier=CACHE)
    logs = tl.where(used, _log_sigmoid(chosen), float("-inf"))
    shares = tl.exp(logs - tl.max(logs, axis=0))
    result = shares / tl.sum(shares, axis=0) * (route_scale * scale)
    tl.store(weights + slot, result, mask=slot < TOP_K)
    tl.store(ids + slot, active, mask=slot < TOP_K)
    tl.store(gammas + slot - TOP_K, result, mask=(slot >= TOP_K) & used)
    return result


@triton.jit
def _route_kernel(
    logits, bias, global_scale, weights, ids, gammas, logits_stride, route_scale, E: tl.constexpr,
    S: tl.constexpr, TOP_K: tl.constexpr, EP: tl.constexpr, AP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EP)
    offset = tl.load(bias + expert, mask=expert < E, other=0.0)
    scale = tl.load(global_scale)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    route_row(
        logits + row * logits_stride, offset, scale, weights + row * TOP_K, ids + row * TOP_K,
        gammas + row * S, route_scale, E, S, TOP_K, EP, AP, "",
    )  # fmt: skip


def check_scores(op: str, **tensors: Tensor) -> None:
    """Raise ValueError naming the first of those that decide between experts and are no float32."""
    for name, value in tensors.items():
        if value.dtype != torch.float32:
            raise ValueError(f"{op}: {name} needs float32, because routing compares close scores; "
                             f"found {value.dtype}, so keep it in float32")  # fmt: skip


def route(
    logits: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, route_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See the contract. Raises ValueError for logits, bias or scale that are not float32."""
    check_rows("route", logits=logits, bias=bias)
    check_scores("route", logits=logits, bias=bias, global_scale=global_scale)
    rows, experts = logits.shape[0], bias.shape[0]
    sinks = logits.shape[1] - experts
    if not 0 < top_k <= experts or sinks < 0:
        raise ValueError(f"route: top_k needs 1 to {experts}, logits at least {experts} columns; "
                         f"found {top_k} and {logits.shape[1]}")  # fmt: skip
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    gammas = torch.empty(rows, sinks, dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits, bias, global_scale, weights, ids, gammas, logits.stride(0), route_scale,
            E=experts, S=sinks, TOP_K=top_k, EP=next_power_of_2(experts),
            AP=next_power_of_2(top_k + sinks), PDL=pdl(), **options(num_warps=1),
        )  # fmt: skip
    return weights, ids, gammas


@triton.jit
def _swiglu_kernel(
    gate_up, weight, out, width, stride, INTERLEAVED: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = gate_up + row * stride
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if INTERLEAVED:
        both = 2 * column[:, None] + tl.arange(0, 2)[None, :]
        gate, up = tl.split(tl.load(source + both, mask=both < 2 * width, other=0.0))
    else:
        gate = tl.load(source + column, mask=inside, other=0.0)
        up = tl.load(source + width + column, mask=inside, other=0.0)
    gate = gate.to(tl.float32)
    y = gate * tl.sigmoid(gate) * up.to(tl.float32)
    if HAS_WEIGHT:
        y *= tl.load(weight + row)
    tl.store(out + row * width + column, y, mask=inside)


def swiglu(gate_up: Tensor, interleaved: bool, weight: Tensor | None) -> Tensor:
    """See the contract."""
    check_rows("swiglu", gate_up=gate_up, weight=weight)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    check_shapes("swiglu", "gate_up TF, weight T", gate_up, weight, F=2 * width)
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows and width:
        block = min(1024, max(16, next_power_of_2(width)))
        # The row is the second axis of the grid, where CUDA allows 65,535: longer steps are cut.
        for start in range(0, rows, 65535):
            part = gate_up[start : start + 65535]
            _swiglu_kernel[(ceil_div(width, block), part.shape[0])](
                part, None if weight is None else weight[start : start + 65535],
                out[start : start + 65535], width, gate_up.stride(0), INTERLEAVED=interleaved,
                HAS_WEIGHT=weight is not None, BLOCK=block, PDL=pdl(),
                **options(num_warps=4 if block >= 512 else 1),
            )  # fmt: skip
    return out


def sink_experts(x: Tensor, w13: Tensor, w2: Tensor, gammas: Tensor) -> Tensor:
    """See the contract. One row: two launches, with the activation inside the first.

    The sinks are one wide expert: their gate and up rows are stacked, and their down projections
    are one product over the intermediates side by side.
    """
    check_rows("sink_experts", x=x, w13=w13, w2=w2, gammas=gammas)
    check_shapes("sink_experts", "x TH=, w13 SDH=, w2 SHI=, gammas TS", x, w13, w2, gammas,
                 D=2 * w2.shape[2])  # fmt: skip
    rows, (sinks, double, width) = x.shape[0], w13.shape
    inner = double // 2
    stacked = w13.reshape(sinks * double, width)
    fixed = order_is_fixed()
    if rows == 1 and not fixed:
        y = x.new_empty(1, sinks * inner)
        one_row(x, stacked, y, gammas=gammas.contiguous(), group=inner)
        return product(y, w2, x.dtype, w2.stride(0), sinks)
    if rows >= MATMUL_FROM and not fixed:
        gate_up = torch.matmul(x, stacked.t())
    else:
        gate_up = product(x, stacked, x.dtype)
    y = swiglu(gate_up.view(rows * sinks, double), True, gammas.reshape(-1))
    y = y.view(rows, sinks * inner)
    if (rows >= MATMUL_FROM and not fixed) or inner % 16:
        beside = w2.permute(1, 0, 2).reshape(width, sinks * inner)
        return product(y, beside, x.dtype) if fixed else torch.matmul(y, beside.t())
    return product(y, w2, x.dtype, w2.stride(0), sinks)
