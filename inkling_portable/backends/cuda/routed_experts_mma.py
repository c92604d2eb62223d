"""The chosen experts, from 4-bit weights through registers to tensor cores of NVIDIA's.

`routed_experts.cu` says how. Two launches up to `BY_TOKEN_TO` tokens; then three, since experts
that several tokens share are read once in the second product too; beyond `FEW` tokens the pairs are
sorted first and activations go through shared memory. Other formats and widths that do not fit go
to the Triton kernels, which read the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inkling_portable.backends.cuda import routed_experts_wgmma as wgmma
from inkling_portable.backends.cuda.compiled import kernel
from inkling_portable.backends.triton import routed_experts as triton
from inkling_portable.backends.triton._common import ceil_div, compute_units, next_power_of_2
from inkling_portable.backends.triton.routed_experts import BLOCKS, Matrix, matrix
from inkling_portable.backends.triton.routed_experts_gemm import combine_kernel
from inkling_portable.backends.triton.routed_experts_sort import make_plan

SOURCE = Path(__file__).with_name("routed_experts.cu")
CHUNK = 128  # columns that the kernels take at a time
FEW = 128
"""Tokens up to which blocks sort the pairs themselves and read activations as they are."""
BY_TOKEN_TO = 16
"""Tokens up to which the second product is computed token by token: one launch less."""
INNER_BYTES = 38 << 20
PARTS_BYTES = 24 << 20
"""Bounds of what lies between the two products, and of what the second one writes for each pair."""


@dataclass(frozen=True)
class Tiles:
    """Settings of one product: warps along k and along rows, tiles of 16 rows of a warp, groups of
    8 tokens, chunks of a step, blocks of an SM."""

    warps_k: int
    warps_m: int
    tiles: int
    groups: int
    ahead: int
    resident: int


def up_tiles(tokens: int, inner: int) -> Tiles:
    """Settings of the first product. What wins on an H200 stands first: benchmarks/experts_tune."""
    chunks = inner // CHUNK
    if chunks % 8:
        return Tiles(1, 4, 1, 1, most_ahead(chunks, 3), 4)
    if tokens == 1:
        return Tiles(4, 1, 1, 1, most_ahead(chunks // 4, 6), 3)
    return Tiles(4, 1, 1, 1, 2, 5) if tokens <= 36 else Tiles(2, 2, 2, 1, 2, 3)


def down_tiles(tokens: int, inner: int) -> Tiles:
    """Settings of the second product where experts are shared."""
    return Tiles(1, 4, 2, 1, 1, 4)


def token_tiles(tokens: int, inner: int) -> Tiles:
    """Settings of the second product token by token: a warp for each slot."""
    if tokens == 1:
        return Tiles(1, 1, 1, 1, 1, 5)
    return Tiles(1, 1, 2, 1, 1 if tokens <= 4 else most_ahead(inner // CHUNK, 3), 2)


def many_tiles(tokens: int, up: bool) -> Tiles:
    """Settings of both products beyond FEW tokens; they agree in the height of a plan's tiles."""
    if tokens <= 512:
        return Tiles(1, 4, 1, 2, 1, 4) if up else Tiles(1, 4, 2, 2, 1, 2)
    if tokens <= 1024:
        return Tiles(1, 8, 1, 4, 1, 2) if up else Tiles(1, 4, 2, 4, 1, 2)
    return Tiles(1, 4, 2, 8, 1, 2) if up else Tiles(1, 8, 1, 8, 1, 2)


def most_ahead(chunks: int, most: int) -> int:
    """The largest divisor of `chunks` that is at most `most`."""
    return next(n for n in range(most, 0, -1) if chunks % n == 0)


def fits(m: Matrix, rows: int) -> bool:
    """Whether a matrix has whole chunks, `rows` at a time, and addresses that loads need."""
    if m.form not in BLOCKS or m.inner % CHUNK or m.rows % rows or m.scale is None:
        return False
    steps = (*m.codes.stride()[:2], m.codes.data_ptr())
    even = (*m.scale.stride()[:2], m.scale.data_ptr())
    return all(s % 16 == 0 for s in steps) and all(s % 2 == 0 for s in even)


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
    """See the contract and the Triton provider, whose limits hold."""
    tokens = x.shape[0]
    if tokens and ids.shape[1] and x.dtype == torch.bfloat16 and format in BLOCKS:
        up = matrix("w13", w13, w13_scale, w13_global, format, x)
        down = matrix("w2", w2, w2_scale, w2_global, format, x)
        aligned = x.stride(-1) == 1 and (x.stride(0) % 8, x.data_ptr() % 16) == (0, 0)
        if act == "bf16" and aligned and fits(up, 128) and fits(down, 128):
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            ids, weights = ids.contiguous(), weights.contiguous()
            share = max(1, INNER_BYTES // (ids.shape[1] * down.inner * 2))
            for start in range(0, tokens, share):
                part = slice(start, start + share)
                step = wgmma.run if wgmma.takes(ids[part], up, down) else _run
                step(x[part], ids[part], weights[part], up, down, interleaved, out[part])
            return out
    return triton.routed_experts(x, ids, weights, w13, w2, w13_scale, w2_scale, w13_global,
                                 w2_global, format, act, interleaved)  # fmt: skip


def _run(x: Tensor, ids: Tensor, weights: Tensor, up: Matrix, down: Matrix, interleaved: bool,
         out: Tensor) -> None:  # fmt: skip
    (tokens, width), top_k = x.shape, ids.shape[1]
    pairs, experts = ids.numel(), up.codes.shape[0]
    many = tokens > FEW
    plan, tiles = None, 0
    if many:
        plan, tiles = make_plan(ids, experts, 8 * many_tiles(tokens, True).groups)

    def product(m: Matrix, source: Tensor, target: Tensor, how: Tiles, first: int, last: int,
                is_up: bool, by_token: bool) -> None:  # fmt: skip
        w_expert, w_row, s_expert, s_row, g_expert, g_row = m.strides()
        slabs = (last - first) // (16 * how.warps_m * how.tiles)
        warps_k = top_k if by_token else how.warps_k
        macros = {
            "K": m.inner, "W_ROW": w_row, "S_ROW": s_row, "TOP_K": top_k, "EXPERTS": experts,
            "BLOCK": BLOCKS[m.form], "GAIN": int(m.gain is not None), "UP": int(is_up),
            "INTERLEAVED": int(interleaved), "HALF": m.rows // 2, "BY_TOKEN": int(by_token),
            "MANY": int(many), "WARPS_K": warps_k, "WARPS_M": how.warps_m, "TILES": how.tiles,
            "NT": how.groups, "AHEAD": how.ahead, "RESIDENT": how.resident,
            "LISTED": 0 if many else max(512, next_power_of_2(pairs)),
        }  # fmt: skip
        run = kernel(SOURCE, "experts", tuple(macros.items()), x.device.index)
        threads = 32 * warps_k * how.warps_m
        strides = (source.stride(0), w_expert, s_expert, g_expert, g_row, target.stride(0))
        if many:
            run.launch((slabs, tiles), threads,
                       (source, plan, m.codes, m.scale, m.gain, weights, target, tiles, experts,
                        first, *strides), 6, False)  # fmt: skip
            return
        # No more tiles than pairs: what the host knows of the routing.
        items = (tokens if by_token else pairs) * slabs
        run.launch((min(items, how.resident * compute_units()), 1), threads,
                   (source, ids, m.codes, m.scale, m.gain, weights, target, pairs, experts, slabs,
                    first, *strides), 6, True)  # fmt: skip

    inner = torch.empty(pairs, down.inner, dtype=x.dtype, device=x.device)
    how = many_tiles(tokens, True) if many else up_tiles(tokens, up.inner)
    product(up, x, inner, how, 0, up.rows, True, False)
    if tokens <= BY_TOKEN_TO:
        product(down, inner, out, token_tiles(tokens, down.inner), 0, down.rows, False, True)
        return
    how = many_tiles(tokens, False) if many else down_tiles(tokens, down.inner)
    step = 16 * how.warps_m * how.tiles
    columns = min(width, max(step, PARTS_BYTES // (pairs * 4) // step * step))
    parts = torch.empty(pairs, columns, dtype=torch.float32, device=x.device)
    for first in range(0, width, columns):
        last = min(width, first + columns)
        product(down, inner, parts, how, first, last, False, False)
        combine_kernel[(ceil_div(last - first, 1024), tokens)](
            parts, ids, out[:, first:last], experts, last - first, columns, out.stride(0),
            TOP_K=top_k, BLOCK=min(1024, next_power_of_2(last - first)), num_warps=4,
        )  # fmt: skip
