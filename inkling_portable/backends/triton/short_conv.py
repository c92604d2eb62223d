"""Short convolution: the request map of a step, and the fused end of a branch.

A tap of a row that is in this step comes from the step's own input, an older one from the paged
state; no program reads what another writes, so every row is independent. Short steps take one
launch, a program holding a whole row with its norm. Longer ones give a program a few channels of
consecutive rows, for which it keeps the weights, and norm in a second launch: their rows are many
enough for that, and a whole row with its taps leaves no registers for reuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton._common import (
    ceil_div,
    check_rows,
    compute_units,
    is_rocm,
    next_power_of_2,
    options,
    pdl,
    row_block,
)
from inkling_portable.backends.triton.norm import add_norm, scaled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@triton.jit
def _token_requests_kernel(q_starts, out, requests, rows, steps, BLOCK: tl.constexpr):
    """Binary search of every row among the starts; empty requests are passed over."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    low = tl.zeros((BLOCK,), dtype=tl.int32)  # starts[low] <= row < starts[high]
    high = low + requests
    for _ in range(steps):
        middle = (low + high) // 2
        start = tl.load(q_starts + middle, mask=inside, other=0)
        right = start <= row
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    stop = tl.load(q_starts + requests)
    tl.store(out + row, tl.where(row < stop, low, -1), mask=inside)


def token_requests(q_starts: Tensor, out: Tensor) -> None:
    """See the contract."""
    check_rows("token_requests", q_starts=q_starts, out=out)
    rows, requests = out.shape[0], q_starts.shape[0] - 1
    if rows:
        block = 256
        _token_requests_kernel[(ceil_div(rows, block),)](
            q_starts, out, requests, rows, requests.bit_length(), BLOCK=block, num_warps=4
        )


@triton.jit
def tap_weight(weight, packed: tl.constexpr, tap: tl.constexpr):
    """Weights of one tap, float32.

    `packed`: `weight` holds the four bf16 taps of a channel in one 64-bit integer, so that a
    thread's weights arrive in 16-byte loads; else it is a tap's own column already.
    """
    if packed:
        bits = ((weight >> (16 * tap)) & 0xFFFF).to(tl.int32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = weight.to(tl.float32)
    return wide


@triton.jit
def load_weight(weight, channel, mask, stride_c, stride_k, tap: tl.constexpr, packed: tl.constexpr):
    """What `tap_weight` takes for channels `channel` of conv weights [C, K]."""
    if packed:
        loaded = tl.load(weight + channel, mask=mask, other=0)
    else:
        loaded = tl.load(weight + channel * stride_c + tap * stride_k, mask=mask, other=0.0)
    return loaded


@triton.jit
def _conv_kernel(
    partial,
    extra,
    residual,
    conv_weight,
    norm_weight,
    normed,
    summed,
    state,
    slots,
    pages,
    requests,
    q_starts,
    positions,
    rows,
    page,
    partial_stride,
    extra_stride,
    residual_stride,
    weight_stride_c,
    weight_stride_k,
    state_stride_b,
    state_stride_t,
    state_stride_g,
    state_stride_w,
    pages_stride,
    eps,
    H: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Without a residual (a channel shard), `summed` receives the convolution itself."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < H
    in_state = (channel // W) * state_stride_g + (channel % W) * state_stride_w
    taps = load_weight(
        conv_weight, channel, inside, weight_stride_c, weight_stride_k, TAPS - 1, PACKED
    )
    if HAS_NORM:
        gain = tl.load(norm_weight + channel, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        if row < rows:
            request = tl.load(requests + row)
            slot = tl.load(slots + row)
            position = tl.load(positions + row)
            z = tl.load(partial + row * partial_stride + channel, mask=inside, other=0.0)
            if HAS_EXTRA:
                more = tl.load(extra + row * extra_stride + channel, mask=inside, other=0.0)
                z = (z.to(tl.float32) + more.to(tl.float32)).to(z.dtype)
            if HAS_RESIDUAL:
                carried = tl.load(
                    residual + row * residual_stride + channel, mask=inside, other=0.0
                )
            real = request >= 0
            owner = tl.maximum(request, 0).to(tl.int64)
            first = tl.load(q_starts + owner).to(tl.int64)
            wide = z.to(tl.float32)
            total = wide + tl.where(real, wide * tap_weight(taps, PACKED, TAPS - 1), 0.0)
            for back in tl.static_range(1, TAPS):
                older = position - back
                # One branch for the whole row, so a tap is read once, from where it is. (A select
                # of pointers would do too, but Triton 3.6 cannot compile it for AMD.)
                value = tl.zeros((BLOCK,), dtype=z.dtype)
                if real & (older >= 0):
                    if row - back >= first:
                        value = tl.load(
                            partial + (row - back) * partial_stride + channel,
                            mask=inside,
                            other=0.0,
                        )
                        if HAS_EXTRA:
                            more = tl.load(
                                extra + (row - back) * extra_stride + channel,
                                mask=inside,
                                other=0.0,
                            )
                            value = (value.to(tl.float32) + more.to(tl.float32)).to(z.dtype)
                    else:
                        block = tl.load(pages + owner * pages_stride + older // page).to(tl.int64)
                        cell = state + block * state_stride_b + (older % page) * state_stride_t
                        cached = tl.load(cell + in_state, mask=inside, other=0.0)
                        value = cached.to(z.dtype)
                tap = value.to(tl.float32)
                if PACKED:
                    kernel = tap_weight(taps, True, TAPS - 1 - back)
                else:
                    kernel = tl.load(
                        conv_weight
                        + channel * weight_stride_c
                        + (TAPS - 1 - back) * weight_stride_k,
                        mask=inside,
                        other=0.0,
                    ).to(tl.float32)
                total += tap * kernel
            write = tl.maximum(slot, 0)
            tl.store(
                state
                + (write // page) * state_stride_b
                + (write % page) * state_stride_t
                + in_state,
                z,
                mask=channel < tl.where(slot >= 0, H, 0),
            )
            y = total.to(z.dtype)
            if HAS_RESIDUAL:
                y = (carried.to(tl.float32) + y.to(tl.float32)).to(z.dtype)
            tl.store(summed + row * H + channel, y, mask=inside)
            if HAS_NORM:
                out = scaled(y.to(tl.float32), gain.to(tl.float32), H, eps)
                tl.store(normed + row * H + channel, out, mask=inside)


def tiling(rows: int, width: int) -> tuple[int, int, int]:
    """(rows, channels, warps) of one program; a block of all channels can norm its row."""
    if rows <= 2 * compute_units():
        # Fewer warps than a norm takes: what is held once a thread weighs less on long threads.
        block, warps = row_block("conv_residual_norm", width)
        return 1, block, warps if is_rocm() else max(1, warps // 2)
    return 16, min(1024, next_power_of_2(width)), 2 if is_rocm() else 4


def packed_taps(weight: Tensor) -> bool:
    """Whether conv weights [C, 4] can be read as one 64-bit integer per channel."""
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[1] == 4
        and weight.is_contiguous()
        and weight.storage_offset() % 4 == 0
    )


def _launch(
    partial: Tensor,
    extra: Tensor | None,
    residual: Tensor | None,
    conv_weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    state: Tensor,
    slots: Tensor,
    pages: Tensor,
    requests: Tensor,
    q_starts: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    check_rows("conv_residual_norm", partial=partial, extra=extra, residual=residual, pages=pages,
               slots=slots, requests=requests, q_starts=q_starts, positions=positions,
               norm_weight=norm_weight)  # fmt: skip
    rows, width = partial.shape
    summed = torch.empty(rows, width, dtype=partial.dtype, device=partial.device)
    normed = summed[:0] if norm_weight is None else torch.empty_like(summed)
    if rows == 0:
        return normed, summed
    if state.shape[2] * state.shape[3] != width:
        raise ValueError(f"conv_residual_norm: state holds {state.shape[2] * state.shape[3]} "
                         f"channels, partial {width}; pass this stream's slice")  # fmt: skip
    packed = packed_taps(conv_weight)
    each, block, warps = tiling(rows, width)
    norm_here = norm_weight is not None and each == 1
    _conv_kernel[(ceil_div(rows, each), ceil_div(width, block))](
        partial,
        extra,
        residual,
        conv_weight.view(torch.int64) if packed else conv_weight,
        norm_weight,
        normed,
        summed,
        state,
        slots,
        pages,
        requests,
        q_starts,
        positions,
        rows,
        state.shape[1],
        partial.stride(0),
        0 if extra is None else extra.stride(0),
        0 if residual is None else residual.stride(0),
        conv_weight.stride(0),
        conv_weight.stride(1),
        state.stride(0),
        state.stride(1),
        state.stride(2),
        state.stride(3),
        pages.stride(0),
        eps,
        H=width,
        W=state.shape[3],
        TAPS=conv_weight.shape[1],
        BLOCK=block,
        ROWS=each,
        PACKED=packed,
        HAS_EXTRA=extra is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm_here,
        PDL=pdl(),
        **options(num_warps=warps),
    )
    if norm_weight is not None and not norm_here:
        add_norm(summed, None, norm_weight, eps, normed, summed, width, width)
    return normed, summed


def conv_residual_norm(
    partial: Tensor,
    extra: Tensor | None,
    residual: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    state: Tensor,
    slots: Tensor,
    pages: Tensor,
    requests: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    group: str,
) -> tuple[Tensor, Tensor]:
    """See the contract: one launch on one rank, else two exchanges with a kernel at each step."""
    if not group:
        return _launch(partial, extra, residual, conv_weight, norm_weight, eps, state, slots, pages,
                       requests, q_starts, positions)  # fmt: skip
    ranks = _process_group(group)
    shard = _reduce_scatter(partial, extra, ranks)
    _, branch = _launch(shard, None, None, conv_weight, None, eps, state, slots, pages, requests,
                        q_starts, positions)  # fmt: skip
    rows, width = residual.shape
    gathered = torch.empty(ranks.size() * rows, branch.shape[1], dtype=branch.dtype,
                           device=branch.device)  # fmt: skip
    torch.distributed.all_gather_into_tensor(gathered, branch, group=ranks)
    check_rows("conv_residual_norm", residual=residual)
    summed = torch.empty(rows, width, dtype=residual.dtype, device=residual.device)
    normed = summed[:0] if norm_weight is None else torch.empty_like(summed)
    add_norm(gathered, residual, norm_weight, eps, normed, summed, 0, branch.shape[1])
    return normed, summed


@triton.jit
def _by_rank_kernel(
    partial,
    extra,
    out,
    rows,
    partial_stride,
    extra_stride,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PDL: tl.constexpr,
):
    """[T, H] partials, summed -> [ranks, T, CHUNK], the order in which a reduce-scatter cuts."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < CHUNK
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    z = tl.load(partial + row * partial_stride + rank * CHUNK + column, mask=inside, other=0.0)
    if HAS_EXTRA:
        more = tl.load(extra + row * extra_stride + rank * CHUNK + column, mask=inside, other=0.0)
        z = (z.to(tl.float32) + more.to(tl.float32)).to(z.dtype)
    tl.store(out + (rank * rows + row) * CHUNK + column, z, mask=inside)


def _reduce_scatter(partial: Tensor, extra: Tensor | None, ranks: ProcessGroup) -> Tensor:
    """[T, H] partial sums on every rank -> this rank's contiguous channels [T, H / ranks]."""
    check_rows("conv_residual_norm", partial=partial, extra=extra)
    (rows, width), count = partial.shape, ranks.size()
    if width % count:
        raise ValueError(f"conv_residual_norm: {width} channels do not divide among {count} ranks; "
                         "use a tensor-parallel size that divides the hidden size")  # fmt: skip
    chunk = width // count
    by_rank = torch.empty(count * rows, chunk, dtype=partial.dtype, device=partial.device)
    if rows:
        block, warps = row_block("conv_residual_norm", chunk)
        _by_rank_kernel[(rows, count)](
            partial,
            extra,
            by_rank,
            rows,
            partial.stride(0),
            0 if extra is None else extra.stride(0),
            CHUNK=chunk,
            BLOCK=block,
            HAS_EXTRA=extra is not None,
            PDL=pdl(),
            **options(num_warps=warps),
        )
    out = torch.empty(rows, chunk, dtype=partial.dtype, device=partial.device)
    torch.distributed.reduce_scatter_tensor(out, by_rank, group=ranks)
    return out


def _process_group(name: str) -> ProcessGroup:
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    return _resolve_process_group(GroupName(name))
