"""Products of 2 to 128 rows with a large matrix on Hopper: the gate, the sinks, linear layers.

What does not fit the kernel goes to Triton's providers.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.cuda.compiled import kernel
from inkling_portable.backends.hand_over import hand_over
from inkling_portable.backends.triton import experts
from inkling_portable.backends.triton import gated_sinks as one_row
from inkling_portable.backends.triton import skinny_linear as linear
from inkling_portable.backends.triton._common import (
    ceil_div,
    check_rows,
    check_shapes,
    compute_units,
    next_power_of_2,
    options,
    pdl,
)
from inkling_portable.backends.triton.experts import route_row

SOURCE = Path(__file__).with_name("few_rows.cu")
MOST_ROWS = 128
WIDEST = 128 * 132
"""Rows of a matrix that blocks take at once; more, such as a head's, are the vendor's library's."""


class Tiles(NamedTuple):
    """Rows of the matrix that a block has, blocks that share its columns, stages of both rings."""

    rows: int
    parts: int
    stages: int
    x_stages: int

    def shared(self, wide: int) -> int:
        """Bytes of shared memory for `wide` rows of x."""
        rings = 128 * (self.stages * self.rows + self.x_stages * wide)
        return max(rings, 4 * wide * (self.rows + 4)) + 16 * (self.stages + self.x_stages)


# By padded rows of x, as timed on an H200 behind the kernel that writes x, for inner dimensions of
# 6,144, and of 768 and 1,024.
LONG = {16: Tiles(64, 4, 11, 8), 32: Tiles(64, 4, 16, 5), 64: Tiles(64, 4, 8, 8),
        128: Tiles(64, 4, 8, 8)}  # fmt: skip
SHORT = {16: Tiles(128, 2, 6, 6), 32: Tiles(64, 1, 7, 6), 64: Tiles(128, 1, 10, 6),
         128: Tiles(64, 1, 7, 6)}  # fmt: skip


def tiles(rows: int, columns: int, inner: int) -> Tiles:
    """Settings of one product; wide matrices have fewer parts, so that all blocks run at once."""
    wide = padded(rows)
    how = (LONG if inner > 1024 else SHORT)[wide]
    if columns <= 512 and inner > 1024:  # a gate
        how = Tiles(64, 8, 12, 8 if wide == 16 else 6)
    parts = max(1, compute_units() // ceil_div(columns, how.rows))
    return how._replace(parts=min(how.parts, 1 << parts.bit_length() - 1))


def padded(rows: int) -> int:
    """Rows of x that the kernel multiplies."""
    return max(16, next_power_of_2(rows))


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel reads these: bfloat16 in pieces of 16 bytes, columns by 64."""
    steps = (x.stride(0), *weight.stride()[:-1])
    return (
        1 < x.shape[0] <= MOST_ROWS and x.dtype == torch.bfloat16
        and not x.shape[1] % 64 and not any(s % 8 for s in steps)
        and not (x.data_ptr() | weight.data_ptr()) % 16
    )  # fmt: skip


def product(
    x: Tensor, weight: Tensor, out: Tensor, segment_stride: int = 0, segments: int = 1,
    gammas: Tensor | None = None, group: int = 1, gate: tuple[Tensor, Tensor] | None = None,
    how: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """x [T, K] times a matrix as in Triton's `product` -> `out`, whose dtype says what is written.

    With `gammas` [T, n] float32 gate and up rows alternate, and out [T, F] has their activation,
    column i times gammas[:, i // group], or with a `gate` and its logits, both of which are written
    in the same launch, the activation alone in float32.
    """
    (rows, inner), columns = x.shape, weight.shape[-2]
    how = how or tiles(rows, columns, inner)
    wide = padded(rows)
    kind = 3 if gammas is not None else int(out.dtype == torch.float32)
    blocks, gates, logits = ceil_div(columns, how.rows), None, None
    if gate is not None:
        (gates, logits), kind = gate, 2
        blocks += ceil_div(len(gates), how.rows)
    macros = (("ROWS", how.rows), ("TOKENS", wide), ("PARTS", how.parts), ("STAGES", how.stages),
              ("X_STAGES", how.x_stages))  # fmt: skip
    kernel(SOURCE, "few_rows", macros, x.device.index).launch(
        (blocks * how.parts, 1), 2 * how.rows + 192,
        (x, weight, out, gammas, gates, logits, kind, group, rows, columns,
         0 if gates is None else len(gates), inner // 64, inner // segments // 64, x.stride(0),
         weight.stride(-2), segment_stride, 0 if gates is None else gates.stride(0)),
        4, pdl(), how.shared(wide),
    )  # fmt: skip
    return out


@triton.jit
def _weigh_kernel(
    logits, bias, global_scale, weights, ids, gammas, inner, out, route_scale, E: tl.constexpr,
    S: tl.constexpr, TOP_K: tl.constexpr, EP: tl.constexpr, AP: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Routes one row and multiplies the activations [S, GROUP] of its sinks by their weights."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EP)
    offset = tl.load(bias + expert, mask=expert < E, other=0.0)
    scale = tl.load(global_scale)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    values = tl.load(inner + row * S * GROUP + i, mask=i < S * GROUP, other=0.0)
    shares = route_row(
        logits + row * (E + S), offset, scale, weights + row * TOP_K, ids + row * TOP_K,
        gammas + row * S, route_scale, E, S, TOP_K, EP, AP, "",
    )  # fmt: skip
    slot = tl.arange(0, AP)
    factor = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in tl.static_range(S):
        gamma = tl.sum(tl.where(slot == TOP_K + s, shares, 0.0), axis=0)
        factor = tl.where(i // GROUP == s, gamma, factor)
    tl.store(out + row * S * GROUP + i, values * factor, mask=i < S * GROUP)


def gated_sinks(
    x: Tensor, gate: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, route_scale: float,
    w13: Tensor, w2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See the contract: a product, routing with the sinks' weights, and a product."""
    (sinks, double, width), rows, experts = w13.shape, len(x), len(bias)
    stacked, group = w13.reshape(sinks * double, width), double // 2
    if not (fits(x, stacked) and fits(x, w2) and fits(x, gate)) or double % 128 or width % 64:
        hand_over("gated_sinks")
        return one_row.gated_sinks(x, gate, bias, global_scale, top_k, route_scale, w13, w2)
    one_row.check_gated(x, gate, bias, global_scale, top_k, w13, w2)
    logits, weights = (x.new_empty(rows, n, dtype=torch.float32) for n in (experts + sinks, top_k))
    ids, gammas = x.new_empty(rows, top_k, dtype=torch.int32), weights.new_empty(rows, sinks)
    inner = weights.new_empty(rows, sinks * group)
    product(x, stacked, inner, gate=(gate, logits))
    y = x.new_empty(inner.shape)
    _weigh_kernel[(rows,)](
        logits, bias, global_scale, weights, ids, gammas, inner, y, route_scale, E=experts, S=sinks,
        TOP_K=top_k, EP=next_power_of_2(experts), AP=next_power_of_2(top_k + sinks), GROUP=group,
        BLOCK=next_power_of_2(sinks * group), PDL=pdl(), **options(num_warps=1),
    )  # fmt: skip
    return logits, weights, ids, product(y, w2, torch.empty_like(x), w2.stride(0), sinks)


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """See the contract."""
    if not fits(x, weight):
        hand_over("gate_logits")
        return experts.gate_logits(x, weight)
    check_rows("gate_logits", x=x, weight=weight)
    check_shapes("gate_logits", "x TH=, weight EH=", x, weight)
    return product(x, weight, x.new_empty(len(x), len(weight), dtype=torch.float32))


def sink_experts(x: Tensor, w13: Tensor, w2: Tensor, gammas: Tensor) -> Tensor:
    """See the contract: two launches, with the activation inside the first."""
    sinks, double, width = w13.shape
    stacked = w13.reshape(sinks * double, width)
    if not (fits(x, stacked) and fits(x, w2)) or double % 128 or width % 64:
        hand_over("sink_experts")
        return experts.sink_experts(x, w13, w2, gammas)
    check_rows("sink_experts", x=x, w13=w13, w2=w2, gammas=gammas)
    check_shapes("sink_experts", "x TH=, w13 SDH=, w2 SHI=, gammas TS", x, w13, w2, gammas,
                 D=2 * w2.shape[2])  # fmt: skip
    y = x.new_empty(len(x), sinks * double // 2)
    product(x, stacked, y, gammas=gammas.float().contiguous(), group=double // 2)
    return product(y, w2, torch.empty_like(x), w2.stride(0), sinks)


def skinny_linear(x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """See the contract."""
    linear.check_skinny(x, weight)
    if scale != 1.0 or not fits(x, weight) or weight.shape[0] % 4 or weight.shape[0] > WIDEST:
        hand_over("skinny_linear")
        if scale == 1.0 and x.shape[0] > 16:
            return torch.nn.functional.linear(x, weight)
        return linear.skinny_linear(x, weight, scale)
    check_rows("skinny_linear", x=x, weight=weight)
    check_shapes("skinny_linear", "x MK=, weight NK=", x, weight)
    return product(x, weight, x.new_empty(len(x), len(weight)))
