"""Launch settings of the routed experts, from the target's numbers and host shapes only."""

from __future__ import annotations

from dataclasses import dataclass

from inkling_portable.backends.triton._common import (
    is_rocm,
    next_power_of_2,
    order_is_fixed,
    target,
)

UNPLANNED_TO = 16
"""Tokens of a step up to which tiles find their tokens without a plan: one launch less."""

INNER_BYTES = 36 << 20
PARTS_BYTES = 24 << 20
"""Temporaries of one part of a step: between the two products, and of the second one per pair.

Inkling's steps of 8,192 tokens at TP8 just fit in one part.
"""
LEAST_COLUMNS = 128
"""Output columns that a part has at least."""


@dataclass(frozen=True)
class Tiling:
    """Weight rows and inner length of a tile's step, warps and pipeline stages."""

    wide: int
    deep: int
    warps: int
    stages: int


def gemv_to() -> int:
    """Tokens up to which 4-bit products run without tensor cores.

    Tokens of so few share hardly an expert, and each costs at most what one alone does: 18 us on an
    H200, where tiles took 70 us for two tokens and 175 us for nine. On a MI300X it is estimated,
    not measured (`ci/cdna_cost.py`): 91 us for 16 tokens, and 129 by tiles, of which the experts
    that tokens share by chance save 15 %. Up to 14 that leaves a lead of 20 %.
    """
    return 14 if target().arch == "gfx942" else 9


@dataclass(frozen=True)
class Rows:
    """Weight rows of a program, 16-column words of its step, warps."""

    each: int
    words: int
    warps: int


def converts_e4m3() -> bool:
    """Whether the target has NVIDIA's instructions for E4M3 and for looking bytes up (sm89 on)."""
    return target().vendor == "cuda" and int(target().arch[2:]) >= 89


def gemv_rows(up: bool, inner: int) -> Rows:
    """Settings of the products without tensor cores.

    A word for each lane of the program: its activations then lie in the lane that needs them.
    """
    if target().vendor == "cpu":
        return Rows(64, min(64, next_power_of_2(inner // 16)), 4)
    if is_rocm():
        return Rows(4, 128, 2) if up else Rows(4, 64 if inner > 512 else 32, 1)
    return Rows(8, 128, 4) if up else Rows(4, 32, 1)


def tokens_per_tile(pairs: int, experts: int) -> int:
    """Rows of a planned tile: about what an expert gets; at most 32 on AMD, where more spills."""
    if order_is_fixed():
        return 16
    tallest = 32 if is_rocm() else 64
    return min(tallest, max(16, next_power_of_2(pairs // max(1, experts))))


def tiling(form: str, up: bool, tall: int, inner: int, exact: bool) -> Tiling:
    """Settings of one product: tiles of `tall` tokens, inner length `inner`."""
    if target().vendor == "cpu":  # the interpreter pays by the operation, not by its size
        return Tiling(128, max(32, min(32 if exact else 512, next_power_of_2(inner))), 4, 1)
    if exact:  # float32 runs on vector units: small blocks keep the code short
        return Tiling(32, 32, 4, 1)
    if is_rocm():
        return Tiling(64, 128 if form in ("nvfp4", "mxfp4") else 64, 4, 2)
    if form in ("nvfp4", "mxfp4"):
        return Tiling(64, 128 if inner % 256 or tall > 16 else 256, 4, 4 if tall <= 32 else 3)
    return Tiling(64, 128 if tall <= 32 else 64, 4, 4 if tall <= 32 else 3)
