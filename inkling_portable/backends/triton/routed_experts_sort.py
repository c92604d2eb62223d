"""Tiles of (token, slot) pairs by expert, planned on the device: nothing returns to the host.

The plan is one int32 buffer: counts [E], first tile of each expert [E], cursors [E], expert of each
tile [tiles] (-1 beyond the last), pairs of each tile [tiles, BM]. `tiles` is what the host knows,
an upper bound for any routing. Where in its expert's list a pair stands may differ from run to run;
no result depends on it, since a tile computes its rows independently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton._common import ceil_div, next_power_of_2, target


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _count_kernel(ids, plan, pairs, experts, tiles, E: tl.constexpr, BM: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Counts, first tiles, cursors at zero, and the expert of each tile; one program."""
    expert = tl.arange(0, E)
    exists = expert < experts
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((E,), dtype=tl.int32)
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(ids + start + lane, mask=start + lane < pairs, other=-1)
        known = (chosen >= 0) & (chosen < experts)
        counts += tl.histogram(chosen, E, mask=known)
    tiles_of = (counts + BM - 1) // BM
    ends = tl.cumsum(tiles_of, axis=0)
    starts = ends - tiles_of
    tl.store(plan + expert, counts, mask=exists)
    tl.store(plan + experts + expert, starts, mask=exists)
    tl.store(plan + 2 * experts + expert, tl.zeros((E,), dtype=tl.int32), mask=exists)
    used = tl.sum(tiles_of, axis=0)
    for start in range(0, tiles, BLOCK):
        tile = start + lane
        tl.store(plan + 3 * experts + tile, tl.full((BLOCK,), -1, dtype=tl.int32),
                 mask=(tile < tiles) & (tile >= used))  # fmt: skip
    for step in range(tl.max(tiles_of, axis=0)):
        tl.store(plan + 3 * experts + starts + step, expert, mask=step < tiles_of)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _place_kernel(ids, plan, pairs, experts, tiles, BM: tl.constexpr, BLOCK: tl.constexpr):
    """Each pair takes the next place of its expert."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = pair < pairs
    chosen = tl.load(ids + pair, mask=exists, other=-1)
    known = exists & (chosen >= 0) & (chosen < experts)
    start = tl.load(plan + experts + chosen, mask=known, other=0)
    rank = tl.atomic_add(plan + 2 * experts + chosen, 1, mask=known, sem="relaxed")
    tl.store(plan + 3 * experts + tiles + start * BM + rank, pair, mask=known)


def most_tiles(pairs: int, experts: int, tall: int) -> int:
    """Tiles that any routing of `pairs` pairs can need: no expert wastes a whole tile."""
    return min(pairs, pairs // tall + experts)


def count(ids: Tensor, plan: Tensor, pairs: int, experts: int, tiles: int, tall: int) -> None:
    """Everything of a plan but its pairs."""
    block = 8192 if target().vendor == "cpu" else 1024
    _count_kernel[(1,)](ids, plan, pairs, experts, tiles, E=next_power_of_2(experts), BM=tall,
                        BLOCK=block, num_warps=8)  # fmt: skip


def make_plan(ids: Tensor, experts: int, tall: int, count: Callable[..., None] = count
              ) -> tuple[Tensor, int]:  # fmt: skip
    """ids [T, k] int32 -> (plan, tiles). Ids outside 0 .. experts - 1 are left out.

    `count` may do other work beside."""
    pairs = ids.numel()
    tiles = most_tiles(pairs, experts, tall)
    plan = torch.empty(3 * experts + tiles * (1 + tall), dtype=torch.int32, device=ids.device)
    count(ids, plan, pairs, experts, tiles, tall)
    _place_kernel[(ceil_div(pairs, 256),)](ids, plan, pairs, experts, tiles, BM=tall, BLOCK=256,
                                           num_warps=4)  # fmt: skip
    return plan, tiles
