"""The chosen experts with weights as the checkpoint stores them: NVFP4, MXFP4, FP8 or BF16.

One layout serves every batch size. A few tokens: matrix-vector work per chosen expert
(`routed_experts_gemv`), two launches. Some more: tiles that find their tokens themselves and a sum
over slots, three launches. More: pairs are sorted by expert on the device first. Grids depend on
host shapes only, and no temporary grows with the number of tokens beyond `routed_experts_tuning`'s
bounds: longer steps run in parts, by tokens and then by output columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inkling_portable.backends.triton._common import (
    ceil_div,
    check_rows,
    check_shapes,
    next_power_of_2,
    order_is_fixed,
)
from inkling_portable.backends.triton.routed_experts_gemm import combine_kernel, tile_kernel
from inkling_portable.backends.triton.routed_experts_gemv import gemv_down_kernel, gemv_up_kernel
from inkling_portable.backends.triton.routed_experts_sort import make_plan
from inkling_portable.backends.triton.routed_experts_tuning import (
    INNER_BYTES,
    LEAST_COLUMNS,
    PARTS_BYTES,
    UNPLANNED_TO,
    converts_e4m3,
    gemv_rows,
    gemv_to,
    tiling,
    tokens_per_tile,
)
from inkling_portable.formats import as_stored

FORMATS = ("bf16", "nvfp4", "mxfp4", "fp8")
BLOCKS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True)
class Matrix:
    """One of the two stacks of matrices as a kernel takes it; a missing part is None."""

    codes: Tensor  # [E, rows, bytes or columns]
    scale: Tensor | None  # uint8 [E, rows, blocks]
    gain: Tensor | None  # float32 [E, 1 or rows]
    form: str  # "bf16", "nvfp4", "mxfp4", "fp8" or "fp8fnuz"
    rows: int
    inner: int
    arranged: bool = False  # as `formats.arranged`; the kernels beside this take no such codes

    def strides(self) -> tuple[int, ...]:
        """Strides of expert and row: codes, scale, gain."""
        scale = (0, 0) if self.scale is None else self.scale.stride()[:2]
        gain = (0, 0)
        if self.gain is not None:
            gain = (self.gain.stride(0), self.gain.stride(1) if self.gain.shape[1] > 1 else 0)
        return (*self.codes.stride()[:2], *scale, *gain)

    def wordable(self) -> bool:
        """Whether rows of 4-bit codes can be read as 64-bit words."""
        steps = (*self.codes.stride()[:2], self.codes.storage_offset())
        return self.form in BLOCKS and all(step % 8 == 0 for step in steps)

    def words(self) -> Matrix:
        """The same with 16 codes in each int64."""
        return replace(self, codes=self.codes.view(torch.int64))


def matrix(name: str, w: Tensor, scale: Tensor | None, gain: Tensor | None, form: str,
            x: Tensor) -> Matrix:  # fmt: skip
    """Raises ValueError naming the argument that does not fit the format."""
    check_rows("routed_experts", **{name: w, f"{name}_scale": scale})
    experts, rows, stored = w.shape
    if form == "bf16":
        if w.dtype != x.dtype and x.dtype != torch.float32:
            raise ValueError(f"routed_experts: {name} needs the dtype of x, {x.dtype}; found "
                             f"{w.dtype}, so convert it once at loading")  # fmt: skip
        return Matrix(w, None, None, form, rows, stored)
    if scale is None:
        raise ValueError(f"routed_experts: format {form!r} needs scales; pass {name}_scale")
    if form == "fp8":
        if w.element_size() != 1 or scale.numel() not in (experts, experts * rows):
            raise ValueError(f"routed_experts: format 'fp8' needs {name} in 8 bits, {name}_scale "
                             f"with one number for each expert or row; found {w.dtype} and scales "
                             f"{list(scale.shape)}")  # fmt: skip
        form = "fp8fnuz" if w.dtype == torch.float8_e4m3fnuz else "fp8"
        return Matrix(w.view(torch.uint8), None, scale.reshape(experts, -1), form, rows, stored)
    inner, block = 2 * stored, BLOCKS[form]
    if w.dtype != torch.uint8 or inner % 32:
        raise ValueError(f"routed_experts: format {form!r} needs {name} packed in uint8 with a "
                         f"multiple of 32 columns; found {w.dtype}, {inner} columns")  # fmt: skip
    if scale.numel() != experts * rows * inner // block or scale.element_size() != 1:
        raise ValueError(f"routed_experts: format {form!r} needs {name}_scale in 8 bits, shape "
                         f"{[experts, rows, inner // block]}; found {scale.dtype} "
                         f"{list(scale.shape)}")  # fmt: skip
    if form == "nvfp4":
        if gain is None or gain.numel() not in (experts, experts * rows):
            found = None if gain is None else list(gain.shape)
            raise ValueError(f"routed_experts: format 'nvfp4' needs {name}_global with one number "
                             f"for each expert or row; found {found}")  # fmt: skip
        gain = gain.reshape(experts, -1)
    else:
        gain = None
    scale = scale.view(torch.uint8).view(experts, rows, inner // block)
    return Matrix(w, scale, gain, form, rows, inner)


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
    """See the contract. act is "bf16"; the ids of a row are distinct, as `route` gives them.

    An id outside 0 .. E-1 adds nothing. MXFP4 scales from 2^64 (codes above 190) may give NaN.
    """
    (w13, _), (w2, format) = as_stored(w13, format), as_stored(w2, format)  # slow where it copies
    if act != "bf16":
        raise ValueError(f"routed_experts: provider triton needs act 'bf16'; found {act!r}; "
                         "use provider reference for quantised activations")  # fmt: skip
    if format not in FORMATS:
        raise ValueError(f"routed_experts: unknown weight format {format!r}; known are "
                         f"{', '.join(FORMATS)}")  # fmt: skip
    check_rows("routed_experts", x=x)
    check_shapes("routed_experts", "x TH, ids TK, weights TK", x, ids, weights)
    up = matrix("w13", w13, w13_scale, w13_global, format, x)
    down = matrix("w2", w2, w2_scale, w2_global, format, x)
    tokens, width = x.shape
    if (up.inner, down.rows, up.rows) != (width, width, 2 * down.inner):
        raise ValueError(f"routed_experts: w13 needs {2 * down.inner} rows of {width}, w2 {width} "
                         f"rows; found {up.rows} of {up.inner} and {down.rows}")  # fmt: skip
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens == 0 or ids.shape[1] == 0:
        return out.zero_()
    ids, weights = ids.contiguous(), weights.contiguous()
    if tokens <= gemv_to() and not order_is_fixed() and up.wordable() and down.wordable():
        _rows(x, ids, weights, up, down, interleaved, out)
        return out
    top_k = ids.shape[1]
    share = min(INNER_BYTES // (top_k * down.inner * x.element_size()),
                PARTS_BYTES // (top_k * LEAST_COLUMNS * 4))  # fmt: skip
    share = max(1, share)
    for start in range(0, tokens, share):
        part = slice(start, start + share)
        _tiles(x[part], ids[part], weights[part], up, down, interleaved, out[part])
    return out


def _rows(x: Tensor, ids: Tensor, weights: Tensor, up: Matrix, down: Matrix, interleaved: bool,
          out: Tensor) -> None:  # fmt: skip
    """Both products without tensor cores; the second sums over slots."""
    tokens, top_k = ids.shape
    experts, up, down = up.codes.shape[0], up.words(), down.words()
    inner = torch.empty(tokens * top_k, down.inner, dtype=x.dtype, device=x.device)
    how = gemv_rows(True, up.inner)
    gemv_up_kernel[(ceil_div(up.rows, how.each), tokens * top_k)](
        x, ids, up.codes, up.scale, up.gain, inner, experts, up.rows, x.stride(0), *up.strides(),
        inner.stride(0), K=up.inner, TOP_K=top_k, FORMAT=up.form, GAIN=up.gain is not None,
        INTERLEAVED=interleaved, EACH=how.each, N=how.words, num_warps=how.warps,
    )  # fmt: skip
    how = gemv_rows(False, down.inner)
    gemv_down_kernel[(ceil_div(down.rows, how.each), tokens)](
        inner, ids, weights, down.codes, down.scale, down.gain, out, experts, down.rows,
        inner.stride(0), *down.strides(), out.stride(0), K=down.inner, TOP_K=top_k,
        FORMAT=down.form, GAIN=down.gain is not None, EACH=how.each, N=how.words,
        num_warps=how.warps,
    )  # fmt: skip


def _tiles(x: Tensor, ids: Tensor, weights: Tensor, up: Matrix, down: Matrix, interleaved: bool,
           out: Tensor) -> None:  # fmt: skip
    """Both products on tensor cores and the sum over slots."""
    (tokens, width), top_k = x.shape, ids.shape[1]
    experts, pairs = up.codes.shape[0], ids.numel()
    planned = order_is_fixed() or tokens > UNPLANNED_TO
    if planned:
        tall = tokens_per_tile(pairs, experts)
        plan, tiles = make_plan(ids, experts, tall)
    else:
        tall, plan, tiles = max(16, next_power_of_2(tokens)), None, pairs
    inner = torch.empty(pairs, down.inner, dtype=x.dtype, device=x.device)
    exact = x.dtype == torch.float32
    ptx = converts_e4m3() and x.dtype == torch.bfloat16

    def launch(m: Matrix, source: Tensor, target: Tensor, is_up: bool, first: int, last: int
               ) -> None:  # fmt: skip
        how = tiling(m.form, is_up, tall, m.inner, exact)
        tile_kernel[(ceil_div(last - first, how.wide), tiles)](
            source, ids, plan, m.codes, m.scale, m.gain, weights, target, tokens, experts, tiles,
            m.rows, first, last, source.stride(0), *m.strides(), target.stride(0),
            K=m.inner, TOP_K=top_k, KP=next_power_of_2(top_k), FORMAT=m.form,
            GAIN=m.gain is not None, UP=is_up, INTERLEAVED=interleaved, PLANNED=planned, BM=tall,
            BN=how.wide, BK=how.deep, EXACT=exact, PTX=ptx, num_warps=how.warps,
            num_stages=how.stages,
        )  # fmt: skip

    launch(up, x, inner, True, 0, up.rows)
    most = PARTS_BYTES // (pairs * 4) // LEAST_COLUMNS * LEAST_COLUMNS
    columns = min(width, max(LEAST_COLUMNS, most))
    parts = torch.empty(pairs, columns, dtype=torch.float32, device=x.device)
    for first in range(0, width, columns):
        last = min(width, first + columns)
        launch(down, inner, parts, False, first, last)
        combine_kernel[(ceil_div(last - first, 1024), tokens)](
            parts, ids, out[:, first:last], experts, last - first, columns, out.stride(0),
            TOP_K=top_k, BLOCK=min(1024, next_power_of_2(last - first)), num_warps=4,
        )  # fmt: skip
