"""The chosen experts from 4-bit weights through registers to tensor cores.

`routed_experts.cu` says how. Two launches up to `BY_TOKEN_TO` tokens; then three, since experts
that several tokens share are read once in the second product too; beyond `UNPLANNED_TO` tokens the
pairs are sorted first. Other formats and widths that do not fit go to the Triton kernels, which
read the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inkling_portable.backends.cuda.compiled import kernel
from inkling_portable.backends.triton import routed_experts as triton
from inkling_portable.backends.triton._common import ceil_div, next_power_of_2
from inkling_portable.backends.triton.routed_experts import BLOCKS, Matrix, matrix
from inkling_portable.backends.triton.routed_experts_gemm import combine_kernel
from inkling_portable.backends.triton.routed_experts_sort import make_plan

SOURCE = Path(__file__).with_name("routed_experts.cu")
CHUNK = 128  # columns that the kernels take at a time
MOST = 1 << 20
"""Tokens up to which these kernels serve."""
UNPLANNED_TO = 256
"""Tokens up to which blocks find the tokens of their expert themselves."""
BY_TOKEN_TO = 16
"""Tokens up to which the second product is computed token by token: one launch less."""
INNER_BYTES = 38 << 20
PARTS_BYTES = 24 << 20
"""Bounds of what lies between the two products, and of what the second one writes for each pair."""


@dataclass(frozen=True)
class Tiles:
    """Settings of `by_expert`: warps along k and along rows, tiles of 16 rows of a warp, groups of
    8 tokens, chunks in flight, blocks of an SM."""

    warps_k: int
    warps_m: int
    tiles: int
    groups: int
    ahead: int
    resident: int


@dataclass(frozen=True)
class Rows:
    """Settings of `by_token`: tiles of 16 rows, chunks in flight, blocks of an SM."""

    tiles: int
    ahead: int
    resident: int


def up_tiles(tokens: int, inner: int) -> Tiles:
    """Settings of the first product."""
    if tokens > UNPLANNED_TO:
        return Tiles(1, 4, 1, groups_for(tokens), 1, 4)
    warps = 8 if inner // CHUNK % 8 == 0 else 1
    return Tiles(warps, 1, 1, groups_for(tokens), most_ahead(inner // CHUNK // warps, 6), 2)


def down_tiles(tokens: int, inner: int) -> Tiles:
    """Settings of the second product where experts are shared."""
    if tokens > UNPLANNED_TO:
        return Tiles(1, 4, 1, groups_for(tokens), 1, 4)
    return Tiles(1, 4, 1, groups_for(tokens), most_ahead(inner // CHUNK, 4), 3)


def down_rows(tokens: int, inner: int) -> Rows:
    """Settings of the second product token by token."""
    return Rows(1, most_ahead(inner // CHUNK, 4), 4)


def groups_for(tokens: int) -> int:
    """Groups of 8 tokens that share one decoding: about what a busy expert gets."""
    return 1 if tokens <= 128 else 2 if tokens <= 512 else 4 if tokens <= 1536 else 8


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
    if 0 < tokens <= MOST and ids.shape[1] and x.dtype == torch.bfloat16 and format in BLOCKS:
        up = matrix("w13", w13, w13_scale, w13_global, format, x)
        down = matrix("w2", w2, w2_scale, w2_global, format, x)
        aligned = x.stride(-1) == 1 and (x.stride(0) % 8, x.data_ptr() % 16) == (0, 0)
        aligned = aligned and x.stride(0) * tokens < 1 << 31  # kernels index x with 32 bits
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
    inner = torch.empty(pairs, down.inner, dtype=x.dtype, device=x.device)
    first_how, second_how = up_tiles(tokens, up.inner), down_tiles(tokens, down.inner)
    plan, tiles = None, 0
    if tokens > UNPLANNED_TO:
        plan, tiles = make_plan(ids, experts, 8 * first_how.groups)

    def by_expert(m: Matrix, source: Tensor, target: Tensor, how: Tiles, first: int, last: int,
                  is_up: bool) -> None:  # fmt: skip
        macros = {
            "WARPS_K": how.warps_k, "WARPS_M": how.warps_m, "TILES": how.tiles, "NT": how.groups,
            "AHEAD": how.ahead, "RESIDENT": how.resident, "UP": int(is_up),
            "INTERLEAVED": int(interleaved), "PLANNED": int(plan is not None),
            "LISTED": 8 * how.groups if plan is not None else UNPLANNED_TO, **_shape(m, top_k),
        }  # fmt: skip
        by_pair = plan is None and pairs <= experts
        grid = ((last - first) // (16 * how.warps_m * how.tiles),
                tiles if plan is not None else pairs if by_pair else experts)  # fmt: skip
        kernel(SOURCE, "by_expert", tuple(macros.items()), x.device.index).launch(
            grid, 32 * how.warps_k * how.warps_m,
            (source, ids, plan, m.codes, m.scale, m.gain, weights, target, pairs, int(by_pair),
             tiles, experts, m.rows, first, source.stride(0), *m.strides(), target.stride(0)),
            8, not is_up,
        )  # fmt: skip

    by_expert(up, x, inner, first_how, 0, up.rows, True)
    if tokens <= BY_TOKEN_TO:
        rows = down_rows(tokens, down.inner)
        macros = {
            "BY_TOKEN": 1, "TILES": rows.tiles, "AHEAD": rows.ahead, "RESIDENT": rows.resident,
            **_shape(down, top_k),
        }  # fmt: skip
        kernel(SOURCE, "by_token", tuple(macros.items()), x.device.index).launch(
            (down.rows // (16 * rows.tiles), tokens), 32 * top_k,
            (inner, ids, down.codes, down.scale, down.gain, weights, out, experts,
             inner.stride(0), *down.strides(), out.stride(0)),
            8, True,
        )  # fmt: skip
        return
    step = 16 * second_how.warps_m * second_how.tiles
    columns = min(width, max(step, PARTS_BYTES // (pairs * 4) // step * step))
    parts = torch.empty(pairs, columns, dtype=torch.float32, device=x.device)
    for first in range(0, width, columns):
        last = min(width, first + columns)
        by_expert(down, inner, parts, second_how, first, last, False)
        combine_kernel[(ceil_div(last - first, 1024), tokens)](
            parts, ids, out[:, first:last], experts, last - first, columns, out.stride(0),
            TOP_K=top_k, BLOCK=min(1024, next_power_of_2(last - first)), num_warps=4,
        )  # fmt: skip


def _shape(m: Matrix, top_k: int) -> dict[str, int]:
    return {"K": m.inner, "TOP_K": top_k, "BLOCK": BLOCKS[m.form], "GAIN": int(m.gain is not None)}
