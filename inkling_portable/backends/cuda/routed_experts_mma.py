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

from inkling_portable.backends.cuda.compiled import kernel
from inkling_portable.backends.triton import routed_experts as triton
from inkling_portable.backends.triton._common import ceil_div, compute_units, next_power_of_2
from inkling_portable.backends.triton.routed_experts import BLOCKS, Matrix, matrix
from inkling_portable.backends.triton.routed_experts_gemm import combine_kernel
from inkling_portable.backends.triton.routed_experts_sort import make_plan

SOURCE = Path(__file__).with_name("routed_experts.cu")
CHUNK = 128  # columns that the kernels take at a time
FEW = 256
"""Tokens up to which blocks sort the pairs themselves and read activations as they are."""
BY_TOKEN_TO = 16
"""Tokens up to which the second product is computed token by token: one launch less."""
INNER_BYTES = 38 << 20
PARTS_BYTES = 24 << 20
"""Bounds of what lies between the two products, and of what the second one writes for each pair."""


@dataclass(frozen=True)
class Tiles:
    """Settings of one product: warps along k and along rows, tiles of 16 rows of a warp, tokens at
    a time, chunks in a warp's ring, blocks of an SM."""

    warps_k: int
    warps_m: int
    tiles: int
    tokens: int
    stages: int
    resident: int

    @property
    def groups(self) -> int:
        """Groups of 8 tokens."""
        return ceil_div(self.tokens, 8)

    def ring_bytes(self, warps: int, rings: int) -> int:
        """Shared memory of the rings of a block's warps; `rings` of them have tokens too."""
        return self.stages * (1024 * self.tiles * warps + 256 * self.tokens * rings)


def up_tiles(tokens: int, inner: int) -> Tiles:
    """Settings of the first product."""
    warps = 4 if inner // CHUNK % 4 == 0 else 1
    return Tiles(warps, 1, 2, tokens_at_once(tokens), 4, 3)


def down_tiles(tokens: int, inner: int) -> Tiles:
    """Settings of the second product where experts are shared."""
    return Tiles(1, 4, 2, tokens_at_once(tokens), 4, 3)


def token_tiles(inner: int) -> Tiles:
    """Settings of the second product token by token: a warp for each slot."""
    return Tiles(1, 1, 1, 1, 4, 3)


def many_tiles(tokens: int, up: bool) -> Tiles:
    """Settings of both products beyond FEW tokens."""
    return Tiles(1, 4, 2, 32 if tokens <= 2048 else 64, 3, 3)


def tokens_at_once(tokens: int) -> int:
    """Tokens that share one decoding: about what a busy expert gets."""
    return 2 if tokens <= 4 else 4 if tokens <= 24 else 8


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
                _run(x[part], ids[part], weights[part], up, down, interleaved, out[part])
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
        plan, tiles = make_plan(ids, experts, many_tiles(tokens, True).tokens)

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
            "NT": how.groups, "TOKENS": how.tokens, "STAGES": how.stages, "RESIDENT": how.resident,
            "LISTED": 0 if many else max(512, next_power_of_2(pairs)),
        }  # fmt: skip
        warps = warps_k * how.warps_m
        run = kernel(SOURCE, "experts", tuple(macros.items()),
                     how.ring_bytes(warps, 1 if many else warps), x.device.index)  # fmt: skip
        threads = 32 * warps
        strides = (source.stride(0), w_expert, s_expert, g_expert, g_row, target.stride(0))
        # No more tiles than pairs: what the host knows of the routing.
        items = (tiles if many else tokens if by_token else pairs) * slabs
        run.launch((min(items, how.resident * compute_units()), 1), threads,
                   (source, ids if plan is None else plan, m.codes, m.scale, m.gain, weights,
                    target, tiles if many else pairs, experts, slabs, first, *strides),
                   6, not many)  # fmt: skip

    inner = torch.empty(pairs, down.inner, dtype=x.dtype, device=x.device)
    how = many_tiles(tokens, True) if many else up_tiles(tokens, up.inner)
    product(up, x, inner, how, 0, up.rows, True, False)
    if tokens <= BY_TOKEN_TO:
        product(down, inner, out, token_tiles(down.inner), 0, down.rows, False, True)
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
