"""The chosen experts, from 4-bit weights to tensor cores of NVIDIA's.

Up to `few_most` tokens one launch (`routed_experts_few.cu`), through which weights stream once by
way of shared memory; beyond, three, of pairs that are sorted first, with weights in registers and
activations in shared memory (`routed_experts.cu`). Other formats and widths that do not fit go to
the Triton kernels, which read the same layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from inkling_portable.backends.cuda import routed_experts_wgmma as wgmma
from inkling_portable.backends.cuda.compiled import kernel
from inkling_portable.backends.triton import routed_experts as triton
from inkling_portable.backends.triton._common import (
    arrivals,
    ceil_div,
    compute_units,
    next_power_of_2,
    target,
)
from inkling_portable.backends.triton.routed_experts import BLOCKS, Matrix, matrix
from inkling_portable.backends.triton.routed_experts_gemm import combine_kernel
from inkling_portable.backends.triton.routed_experts_sort import make_plan
from inkling_portable.formats import ARRANGED

SOURCE = Path(__file__).with_name("routed_experts.cu")
FEW_SOURCE = Path(__file__).with_name("routed_experts_few.cu")
CHUNK = 128  # columns that the kernels take at a time
INNER_BYTES = 38 << 20
PARTS_BYTES = 24 << 20
"""Bounds of what lies between the two products, and of what the second one writes for each pair."""
MOST_TOKENS = 65_534  # of one launch: they are the second axis of a grid, with one more program


@dataclass(frozen=True)
class Tiles:
    """Settings of one product of many tokens: warps along rows, tiles of 16 rows of a warp, groups
    of 8 tokens, blocks of an SM."""

    warps: int
    tiles: int
    groups: int
    resident: int


@dataclass(frozen=True)
class Stream:
    """Settings of a few tokens: warps that compute; of the first product, warps that share columns,
    tiles of 16 rows of a warp, columns of a stage; of the second one, tiles and columns; stages,
    blocks of an SM; warps that bring weights."""

    warps: int
    up_warps_k: int
    up_tiles: int
    up_columns: int
    down_tiles: int
    down_columns: int
    stages: int
    resident: int
    bringers: int = 1

    def stage(self, m: Matrix, is_up: bool) -> int:
        """Bytes of a stage for one product, or 0 where rows, columns or copies come out uneven."""
        assert m.scale is not None
        tiles, columns, warps_k = (
            (self.up_tiles, self.up_columns, self.up_warps_k) if is_up
            else (self.down_tiles, self.down_columns, 1)
        )  # fmt: skip
        _, _, s_expert, s_row, _, _ = m.strides()
        scales, groups = columns // BLOCKS[m.form], self.warps // warps_k
        whole = not is_up and columns == m.inner and s_row == scales
        rows, sizes = 16 * tiles * (groups if is_up else 1), s_expert | m.scale.data_ptr()
        if m.inner % columns or columns % (CHUNK * warps_k) or m.rows % rows:
            return 0
        if (sizes if whole else sizes | s_row | scales) % 16:
            return 0
        codes = (columns // 128 | 1) * 64
        if not is_up and columns == m.inner == 2 * m.strides()[1]:
            codes = columns // 2
        return groups * 16 * tiles * (codes + (scales if whole else (scales // 16 | 1) * 16))

    def buffers(self, up: Matrix, down: Matrix, pairs: int) -> int:
        """Of how many slabs a block's shared memory can keep what each pair adds; 0 if none."""
        stages, experts = (self.stage(up, True), self.stage(down, False)), up.codes.shape[0]
        listed = _listed(pairs)
        # Beside what the source names an SM has a KiB for each block.
        named = 7 * listed + 4 * min(listed, experts + listed // 8) + 8 * experts + 2048
        left = ((target().shared_kib or 227) + 1 << 10) // self.resident - named
        left -= self.stages * max(stages)
        own = ceil_div(down.rows, 16 * self.down_tiles * self.resident * compute_units())
        if not all(stages) or left < 1024 * self.warps * self.up_tiles:
            return 0
        fit = min(own, left // (pairs * 64 * self.down_tiles))
        return fit if fit == own else min(fit, 2)

    def shared(self, up: Matrix, down: Matrix, pairs: int) -> int:
        """Bytes of dynamic shared memory, or 0 if it does not fit."""
        parts = self.buffers(up, down, pairs) * pairs * 64 * self.down_tiles
        ring = self.stages * max(self.stage(up, True), self.stage(down, False))
        return ring + max(parts, 1024 * self.warps * self.up_tiles) if parts else 0


def _listed(pairs: int) -> int:
    return max(64, next_power_of_2(pairs))


def few_most(inner: int) -> int:
    """Tokens up to which blocks sort the pairs themselves and weights go through shared memory."""
    return 256 if inner <= 384 else 128


def stream_settings(tokens: int, hidden: int, inner: int) -> tuple[Stream, ...]:
    """Settings of a few tokens, as measured on an H200; the first that fits is taken."""
    if inner <= 384:
        warps = 12 if tokens <= 12 or 24 < tokens <= 64 else 16
        most = 2 if 4 < tokens <= 12 else 3
        return tuple(Stream(warps, warps, 1, hidden, 1, inner, s, 1, most) for s in (3, 2))
    if inner <= 1024:
        return tuple(Stream(8, 8, 1, hidden, 1, inner, stages, 1, 3) for stages in (3, 2))
    return Stream(8, 8, 1, hidden, 1, 1024, 2, 1, 7), Stream(8, 8, 1, hidden, 1, 512, 3, 1, 7)


def many_tiles(tokens: int, up: bool) -> Tiles:
    """Settings of both products beyond few tokens; they agree in the height of a plan's tiles."""
    if tokens <= 512:
        return Tiles(4, 1, 2, 4) if up else Tiles(4, 2, 2, 2)
    if tokens <= 1024:
        return Tiles(8, 1, 4, 2) if up else Tiles(4, 2, 4, 2)
    return Tiles(4, 2, 8, 2) if up else Tiles(8, 1, 8, 2)


def fits(m: Matrix, rows: int) -> bool:
    """Whether a matrix has whole chunks, `rows` at a time, and addresses that loads need."""
    if m.form not in BLOCKS or m.inner % CHUNK or m.rows % rows or m.scale is None:
        return False
    steps = (*m.codes.stride()[:2], m.codes.data_ptr())
    even = (*m.scale.stride()[:2], m.scale.data_ptr())
    return all(s % 16 == 0 for s in steps) and all(s % 2 == 0 for s in even)


def part_most(top_k: int, inner: int, experts: int) -> int:
    """Tokens of each part of a longer step but the last; parts of one size, so that no step needs
    more memory than the longest, by which an engine counts.

    Hopper's kernels, which need the most, take all parts of up to 512 experts. Fours of tokens have
    ids at whole 16 bytes, so that a part launches what a step of its length does.
    """
    tiles = max(wgmma.MOST_TILES - experts, wgmma.MOST_TILES // 2)
    pairs = min(INNER_BYTES // (inner * 2), tiles * wgmma.tiles(math.inf, True).tokens)
    return max(4, min(MOST_TOKENS, pairs // top_k) // 4 * 4)


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
    tokens, form = x.shape[0], format.removesuffix(ARRANGED)
    if tokens and ids.shape[1] and x.dtype == torch.bfloat16 and form in BLOCKS:
        up = replace(matrix("w13", w13, w13_scale, w13_global, form, x), arranged=form != format)
        down = replace(matrix("w2", w2, w2_scale, w2_global, form, x), arranged=form != format)
        aligned = x.stride(-1) == 1 and (x.stride(0) % 8, x.data_ptr() % 16) == (0, 0)
        if act == "bf16" and aligned and fits(up, 128) and fits(down, 128):
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            ids, weights = ids.contiguous(), weights.contiguous()
            most = part_most(ids.shape[1], down.inner, up.codes.shape[0])
            for start in range(0, tokens, most):
                part = slice(start, start + most)
                count = min(most, tokens - start)
                long = count > few_most(down.inner) and wgmma.takes(ids[part], up, down)
                step = wgmma.run if long else _run
                step(x[part], ids[part], weights[part], up, down, interleaved, out[part])
            return out
    return triton.routed_experts(x, ids, weights, w13, w2, w13_scale, w2_scale, w13_global,
                                 w2_global, format, act, interleaved)  # fmt: skip


def _stream(x: Tensor, ids: Tensor, weights: Tensor, up: Matrix, down: Matrix, how: Stream,
            interleaved: bool, out: Tensor) -> None:  # fmt: skip
    """Both products of a few tokens in one launch, or in two where blocks cannot meet."""
    pairs, experts = ids.numel(), up.codes.shape[0]
    shared = how.shared(up, down, pairs)
    inner = torch.empty(pairs, down.inner, dtype=x.dtype, device=x.device)
    w13, w2 = up.strides(), down.strides()
    macros = {
        "HIDDEN": up.inner, "INNER": down.inner, "W13_ROW": w13[1], "S13_ROW": w13[3],
        "W2_ROW": w2[1], "S2_ROW": w2[3], "TOP_K": ids.shape[1], "EXPERTS": experts,
        "BLOCK": BLOCKS[up.form], "GAIN": int(up.gain is not None),
        "INTERLEAVED": int(interleaved), "WARPS": how.warps, "UP_WARPS_K": how.up_warps_k,
        "UP_TILES": how.up_tiles, "UP_KS": how.up_columns, "DOWN_TILES": how.down_tiles,
        "DOWN_KS": how.down_columns, "STAGES": how.stages, "RESIDENT": how.resident,
        "BRINGERS": how.bringers, "LISTED": _listed(pairs), "BUFFERS": how.buffers(up, down, pairs),
        "ARRANGED": int(up.arranged),
    }  # fmt: skip
    run = kernel(FEW_SOURCE, "experts", tuple(macros.items()), x.device.index)
    threads = 32 * (how.warps + 1 + how.bringers)
    counters = None
    if x.device.type == "cuda" and run.resident(threads, shared) >= how.resident:
        counters = arrivals(x.device, "routed_experts")
    for phases in (1, 2) if counters is None else (3,):
        run.launch((how.resident * compute_units(), 1), threads,
                   (x, ids, weights, inner, out, counters, up.codes, up.scale, up.gain, down.codes,
                    down.scale, down.gain, pairs, phases, x.stride(0), w13[0], w13[2], *w13[4:],
                    w2[0], w2[2], *w2[4:], out.stride(0)),
                   10, True, shared)  # fmt: skip


def _run(x: Tensor, ids: Tensor, weights: Tensor, up: Matrix, down: Matrix, interleaved: bool,
         out: Tensor) -> None:  # fmt: skip
    (tokens, width), top_k = x.shape, ids.shape[1]
    pairs, experts = ids.numel(), up.codes.shape[0]
    if tokens <= few_most(down.inner):
        for settings in stream_settings(tokens, up.inner, down.inner):
            if settings.shared(up, down, pairs):
                _stream(x, ids, weights, up, down, settings, interleaved, out)
                return
    inner = torch.empty(pairs, down.inner, dtype=x.dtype, device=x.device)
    plan, tiles = make_plan(ids, experts, 8 * many_tiles(tokens, True).groups)

    def product(m: Matrix, source: Tensor, target: Tensor, first: int, last: int, is_up: bool
                ) -> None:  # fmt: skip
        how = many_tiles(tokens, is_up)
        w_expert, w_row, s_expert, s_row, g_expert, g_row = m.strides()
        macros = {
            "K": m.inner, "W_ROW": w_row, "S_ROW": s_row, "TOP_K": top_k,
            "BLOCK": BLOCKS[m.form], "GAIN": int(m.gain is not None), "UP": int(is_up),
            "INTERLEAVED": int(interleaved), "HALF": m.rows // 2, "WARPS_M": how.warps,
            "TILES": how.tiles, "NT": how.groups, "RESIDENT": how.resident,
            "ARRANGED": int(m.arranged),
        }  # fmt: skip
        run = kernel(SOURCE, "experts", tuple(macros.items()), x.device.index)
        run.launch(((last - first) // (16 * how.warps * how.tiles), tiles), 32 * how.warps,
                   (source, plan, m.codes, m.scale, m.gain, weights, target, tiles, experts, first,
                    source.stride(0), w_expert, s_expert, g_expert, g_row, target.stride(0)),
                   6, False)  # fmt: skip

    product(up, x, inner, 0, up.rows, True)
    how = many_tiles(tokens, False)
    step = 16 * how.warps * how.tiles
    columns = min(width, max(step, PARTS_BYTES // (pairs * 4) // step * step))
    parts = torch.empty(pairs, columns, dtype=torch.float32, device=x.device)
    for first in range(0, width, columns):
        last = min(width, first + columns)
        product(down, inner, parts, first, last, False)
        combine_kernel[(ceil_div(last - first, 1024), tokens)](
            parts, ids, out[:, first:last], experts, last - first, columns, out.stride(0),
            TOP_K=top_k, BLOCK=min(1024, next_power_of_2(last - first)), num_warps=4,
        )  # fmt: skip
