"""conv_residual_norm for many rows on one rank; fewer, and what does not fit, go to Triton's."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from torch import Tensor

from inkling_portable.backends.cuda.compiled import kernel
from inkling_portable.backends.triton import short_conv as triton
from inkling_portable.backends.triton._common import ceil_div, check_shapes, compute_units

SOURCE = Path(__file__).with_name("short_conv_rows.cu")
FROM = 265
"""Rows from which this is faster: more than the Triton kernels take in whole rows."""
MOST_ROWS, STAGES = 64, 4
"""Rows of a block at most, and on their way to it: of 6,144 channels 144 KiB of shared memory."""


def takes(wide: tuple[Tensor, ...], narrow: tuple[Tensor, ...], conv_weight: Tensor) -> bool:
    """Whether the kernel reads these: four taps, bfloat16 in pieces of 16 bytes, and no gaps in the
    narrow ones; the last of the wide ones is the state."""
    width, part = wide[0].shape[1], wide[-1].shape[3]
    pieces = (*wide, conv_weight, narrow[0])
    return (
        not (width % 256 or width > 6144 or part % 8) and triton.packed_taps(conv_weight)
        and all(t.is_contiguous() for t in narrow)
        and all(t.dtype == torch.bfloat16 and not t.data_ptr() % 16 for t in pieces)
        and all(t.stride(-1) == 1 and not any(s % 8 for s in t.stride()[:-1]) for t in wide)
    )  # fmt: skip


def conv_residual_norm(
    partial: Tensor, extra: Tensor | None, residual: Tensor, conv_weight: Tensor,
    norm_weight: Tensor | None, eps: float, state: Tensor, slots: Tensor, sources: Tensor,
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See the contract."""
    rows, width = partial.shape
    wide = (partial, residual, state) if extra is None else (partial, extra, residual, state)
    if norm_weight is None or group or rows < FROM or not takes(
        wide, (norm_weight, slots, sources), conv_weight
    ):  # fmt: skip
        return triton.conv_residual_norm(
            partial, extra, residual, conv_weight, norm_weight, eps, state, slots, sources, group
        )
    check_shapes("conv_residual_norm", "partial TH=, extra TH=, residual TH=, norm_weight H, slots "
                 "T, conv_weight HK, sources TS, state BXGW=", partial, extra, residual,
                 norm_weight, slots, conv_weight, sources, state, S=3)  # fmt: skip
    summed, normed = (residual.new_empty(rows, width) for _ in range(2))
    each = min(MOST_ROWS, ceil_div(rows, compute_units()))
    macros = (("H", width), ("W", state.shape[3]), ("EXTRA", len(wide) - 3),
              ("MOST_ROWS", MOST_ROWS), ("STAGES", STAGES))  # fmt: skip
    kernel(SOURCE, "conv_rows", macros, partial.device.index).launch(
        (ceil_div(rows, each), 1), width // 8,
        (partial, extra, residual, conv_weight, norm_weight, normed, summed, state, slots, sources,
         rows, state.shape[1], int.from_bytes(struct.pack("<f", eps), "little", signed=True),
         *(0 if t is None else t.stride(0) for t in (partial, extra, residual)),
         *state.stride()[:3]), 6, True, STAGES * (len(wide) - 1) * width * 2,
    )  # fmt: skip
    return normed, summed
