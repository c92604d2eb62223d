"""The chosen experts of many tokens on Hopper: 4-bit weights through registers to WGMMA.

`routed_experts_wgmma.cu` says how. Pairs are sorted by expert first; the columns of x are arranged
as the kernel wants them in the memory of the output, which nothing else needs until the end. What
the second product writes for each pair, 604 MB for 8,192 tokens of the large model, is rounded to
bfloat16, which the engine's kernels do too and the contract allows. Launches of a few columns each,
whose results stay in the L2, cost more than memory does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.cuda.compiled import kernel
from inkling_portable.backends.triton._common import ceil_div, compute_units, next_power_of_2
from inkling_portable.backends.triton.routed_experts import BLOCKS, Matrix
from inkling_portable.backends.triton.routed_experts_sort import (
    _count_kernel,
    make_plan,
    most_tiles,
)

SOURCE = Path(__file__).with_name("routed_experts_wgmma.cu")
CHUNK = 128  # columns of a step
FROM = 256
"""Tokens from which this is faster than the kernels for fewer, on an H200."""
MOST_TILES, MOST_EXPERTS = 1024, 4096
"""Tiles of a plan that a block can list, and experts."""
SORTED_FROM = 80
"""Tokens of a tile from which products, not bytes, take the time, and blocks' shares are evened."""
SHARED_BYTES = 228 << 10  # of an SM, 1,024 of them for each block's own ends


@dataclass(frozen=True)
class Tiles:
    """Settings of one product.

    Warpgroups of 64 rows; tokens at most, of which an item takes the next of tokens,
    tokens - grain, .. least; steps in shared memory at most; blocks of an SM; halves of the tokens
    with sums of their own, and `grain` is of the last one; slabs of rows for which a block keeps
    the tokens' columns, all of them, or 1.
    """

    groups: int
    tokens: int
    grain: int
    least: int
    stages: int
    resident: int = 1
    halves: int = 1
    run: int = 1

    def shared(self, m: Matrix) -> tuple[int, int]:
        """(steps, bytes) in a block's shared memory."""
        step = 64 * self.groups * (CHUNK // 2 + CHUNK // BLOCKS[m.form]) + 16
        lists = 4 * 4 * self.tokens + 4 * MOST_TILES
        if self.run == 1:
            step += self.tokens * CHUNK * 2
        else:
            lists += self.tokens * m.inner * 2 + m.inner // CHUNK * 8
        most = (SHARED_BYTES // self.resident - 1024 - lists) // step
        stages = min(self.stages, m.inner // CHUNK * 3 * self.run, most)
        return stages, stages * step + lists


def tiles(load: float, up: bool, wide: bool = False) -> Tiles:
    """Settings for `load` pairs of an expert, as measured on an H200; `wide` as of `wide`.

    Both products have tiles of as many tokens.
    """
    if load > 112 and wide:
        # Codes are decoded once for nearly all tokens of an expert. The first product copies much,
        # which three warpgroups share; the second one little, and two have the registers they want.
        return Tiles(3, 224, 16, 16, 3, 1, 2) if up else Tiles(2, 224, 16, 16, 5, 1, 2, 8)
    if load <= 8:
        return Tiles(4, 16, 16, 16, 6)
    if load <= 16:
        return Tiles(2, 32, 16, 16, 6, 2)
    if load <= 32:
        return Tiles(2, 48, 16, 16, 4, 2)
    if load <= 64:
        return Tiles(4, 80, 16, 32, 5)
    return Tiles(4, 112, 16, 64 if load <= 112 else 16, 4)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def arrange_kernel(x, out, x_stride, width, ids, plan, pairs, experts, tiles, E: tl.constexpr,
                   BM: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Of each 128 columns, 32 q + 8 i + 4 e + c goes to 32 i + 8 c + 2 q + e.

    The first program counts pairs instead, for which the others leave it about the time it takes.
    """
    row = tl.program_id(1).to(tl.int64) - 1
    if row >= 0:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + row * x_stride + column, mask=column < width, other=0.0)
        values = tl.permute(tl.reshape(values, (BLOCK // 128, 4, 4, 2, 4)), (0, 2, 4, 1, 3))
        tl.store(out + row * width + column, tl.reshape(values, (BLOCK,)), mask=column < width)
    elif tl.program_id(0) == 0:
        _count_kernel(ids, plan, pairs, experts, tiles, E, BM, COUNT)


def takes(ids: Tensor, up: Matrix, down: Matrix) -> bool:
    """Whether a step is one for these kernels, on this GPU, and both matrices fit."""
    experts, pairs = up.codes.shape[0], ids.numel()
    tall = tiles(pairs / experts, True, wide(up, down, pairs)).tokens
    return (len(ids) >= FROM and torch.cuda.get_device_capability() == (9, 0)
            and most_tiles(pairs, experts, tall) <= MOST_TILES and experts <= MOST_EXPERTS
            and _fits(up, 256) and _fits(down, 256))  # fmt: skip


def wide(up: Matrix, down: Matrix, pairs: int) -> bool:
    """Whether both matrices suit tiles of 224 tokens, of which the second product keeps all
    columns; pairs are numbered in 16 bits then."""
    return (up.rows % 192 == 0 and down.rows % 1024 == 0 and down.inner <= 384
            and pairs < 1 << 16)  # fmt: skip


def _fits(m: Matrix, rows: int) -> bool:
    if m.form not in BLOCKS or m.inner % CHUNK or m.rows % rows or m.scale is None:
        return False
    codes = (*m.codes.stride()[:2], m.codes.data_ptr())
    scales = (*m.scale.stride()[:2], m.scale.data_ptr())
    return all(s % 16 == 0 for s in codes) and all(s % (CHUNK // BLOCKS[m.form]) == 0
                                                   for s in scales)  # fmt: skip


def run(x: Tensor, ids: Tensor, weights: Tensor, up: Matrix, down: Matrix, interleaved: bool,
        out: Tensor) -> None:  # fmt: skip
    """x and out [T, H] bfloat16, out contiguous; ids [T, k] int32 and weights [T, k] contiguous."""
    (tokens, width), top_k = x.shape, ids.shape[1]
    pairs, experts = ids.numel(), up.codes.shape[0]
    load, both = pairs / experts, wide(up, down, pairs)

    def arrange(ids: Tensor, plan: Tensor, pairs: int, experts: int, tiles: int, tall: int) -> None:
        arrange_kernel[(ceil_div(width, 2048), tokens + 1)](
            x, out, x.stride(0), width, ids, plan, pairs, experts, tiles,
            E=next_power_of_2(experts), BM=tall, COUNT=4096, BLOCK=2048, num_warps=4,
        )  # fmt: skip

    plan, count = make_plan(ids, experts, tiles(load, True, both).tokens, arrange)

    def product(m: Matrix, source: Tensor, target: Tensor, is_up: bool) -> None:
        how = tiles(load, is_up, both)
        w_expert, w_row, s_expert, s_row, g_expert, g_row = m.strides()
        stages, shared = how.shared(m)
        macros = {
            "K": m.inner, "W_ROW": w_row, "S_ROW": s_row, "TOP_K": top_k, "BLOCK": BLOCKS[m.form],
            "GAIN": int(m.gain is not None), "UP": int(is_up), "INTERLEAVED": int(interleaved),
            "HALF": m.rows // 2, "GROUPS": how.groups, "NT": how.tokens, "GRAIN": how.grain,
            "LEAST": how.least, "HALVES": how.halves, "STAGES": stages, "RUN": how.run,
            "RESIDENT": how.resident, "SORTED": int(how.tokens >= SORTED_FROM),
            "ARRANGED": int(m.arranged),
        }  # fmt: skip
        slabs = m.rows // (64 * how.groups)
        blocks = min(count * slabs // how.run, how.resident * compute_units())
        kernel(SOURCE, "experts", tuple(macros.items()), x.device.index).launch(
            (blocks, 1), 128 * how.groups + 128,
            (source, plan, m.codes, m.scale, m.gain, target, count, experts, slabs,
             source.stride(0), w_expert, s_expert, g_expert, g_row, target.stride(0)),
            6, False, shared)  # fmt: skip

    inner = torch.empty(pairs, down.inner, dtype=x.dtype, device=x.device)
    product(up, out, inner, True)
    parts = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    product(down, inner, parts, False)
    own = (("COMBINE", 1), ("TOP_K", top_k), ("BLOCK", BLOCKS[down.form]), ("RESIDENT", 1))
    kernel(SOURCE, "combine", own, x.device.index).launch(
        (ceil_div(tokens * width, 2048), 1), 256,
        (parts, ids, weights, out, tokens, experts, width, width, out.stride(0)), 2, True,
    )  # fmt: skip
