"""Contracts of the vision and audio towers: norm with GELU, and the dMel lookup with its norm.

Towers round twice in a norm (once when normalised, once when scaled), as the models were trained;
the text path rounds once. Statistics and sums are float32, or float64 when the inputs are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inkling_portable.inputs import Draw
from inkling_portable.numerics import within_twice_baseline
from inkling_portable.registry import op

SUMMED_AT_ONCE = 1 << 21
"""Values that the dMel lookup holds in float32 at a time, whatever the length of the clip."""


def two_step_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, rounded to x's dtype before and after `weight`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def norm_gelu_inputs(draw: Draw) -> dict[str, Any]:
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    rows = draw.integer(0, 9)
    width = draw.choice((64, 128, 320, 1216, 4800))
    return {
        "x": draw.tensor((rows, width), dtype),
        "weight": draw.tensor((width,), dtype, "gain"),
        "eps": 1e-6,
    }


@op(inputs=norm_gelu_inputs, tolerance=within_twice_baseline())
def norm_gelu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Two-step RMS norm, then the exact (erf) GELU: `[N, C]` of x's dtype."""
    return torch.nn.functional.gelu(two_step_norm(x, weight, eps))


def dmel_embed_norm_inputs(draw: Draw) -> dict[str, Any]:
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    frames, mel, levels = draw.integer(0, 9), draw.choice((1, 4, 80)), draw.choice((2, 16))
    width = draw.choice((32, 128, 192))
    bins = draw.tensor((frames, mel), torch.float32).mul(levels).abs().long() % levels
    return {
        "bins": bins.int(),
        "table": draw.tensor((mel * levels, width), dtype),
        "weight": draw.tensor((width,), dtype, "gain"),
        "eps": 1e-6,
    }


@op(inputs=dmel_embed_norm_inputs, tolerance=within_twice_baseline())
def dmel_embed_norm(bins: Tensor, table: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One embedding per audio frame: the sum of one table row per mel bin, then two-step RMS norm.

    `bins` int [F, M] with levels in [0, L); `table` [M*L, H], row m*L + level; gives [F, H]. The
    sum is rounded to storage once. Rows are added bin by bin, so memory does not grow with M.
    """
    frames, mel = bins.shape
    width, levels = table.shape[1], table.shape[0] // mel
    wide = torch.promote_types(table.dtype, torch.float32)
    summed = table.new_empty(frames, width)
    step = max(1, SUMMED_AT_ONCE // width)
    for start in range(0, frames, step):
        part = bins[start : start + step].long()
        total = torch.zeros(part.shape[0], width, dtype=wide, device=table.device)
        for m in range(mel):
            total += table[part[:, m] + m * levels]
        summed[start : start + step] = total
    return two_step_norm(summed, weight, eps)
