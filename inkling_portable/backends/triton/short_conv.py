"""Short convolution: where a step's taps come from, and the fused end of a branch.

A tap that is a row of this step comes from the step's own input, an older one from the paged state;
no program reads what another writes, so every row is independent. Short steps take one
launch, a program holding a whole row with its norm. Longer ones give a program a few channels of
consecutive rows, for which it keeps the weights, and norm in a second launch: their rows are many
enough for that, and a whole row with its taps leaves no registers for reuse.

Launched dependently, a program that has one row asks for its slot, sources, residual and the taps
in the state before what runs before it has ended. So these are to be there before the kernel that
is launched right before begins: in a model only the partial sums come from that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from inkling_portable.backends.triton._common import (
    ceil_div,
    check_rows,
    check_shapes,
    check_table,
    compute_units,
    is_rocm,
    next_power_of_2,
    options,
    order_is_fixed,
    pdl,
    row_block,
)
from inkling_portable.backends.triton.norm import add_norm, scaled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@triton.jit(do_not_specialize=["rows", "requests", "halvings", "pages_stride"])
def _sources_kernel(
    q_starts,
    kv_lens,
    pages,
    slots,
    rows_of,
    out,
    rows,
    requests,
    halvings,
    page,
    pages_stride,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCATTER: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Map this step's slots to rows (SCATTER), then look every earlier tap up (GATHER).

    Both at once only in a single program, whose barrier orders them.
    """
    first = tl.program_id(0) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    if SCATTER:
        for base in range(first, rows, stride):
            row = base + tl.arange(0, BLOCK)
            slot = tl.load(slots + row, mask=row < rows, other=-1)
            tl.store(rows_of + slot, row, mask=slot >= 0)
    if SCATTER and GATHER:
        tl.debug_barrier()
    if GATHER:
        stop = tl.load(q_starts + requests)
        for base in range(first, rows, stride):
            row = base + tl.arange(0, BLOCK)
            live = row < rows
            real = row < stop
            low = tl.zeros((BLOCK,), dtype=tl.int32)  # starts[low] <= row < starts[high]
            high = low + requests
            for _ in range(halvings):
                middle = (low + high) // 2
                right = tl.load(q_starts + middle, mask=real, other=0) <= row
                low = tl.where(right, middle, low)
                high = tl.where(right, high, middle)
            start = tl.load(q_starts + low, mask=real, other=0)
            position = tl.load(kv_lens + low, mask=real, other=0) + row
            position -= tl.load(q_starts + low + 1, mask=real, other=0)
            for back in tl.static_range(1, TAPS):
                older = position - back
                wanted = real & (older >= 0)
                look = wanted & (row - back < start)
                at = tl.maximum(older, 0)
                block = tl.load(
                    pages + low.to(tl.int64) * pages_stride + at // page, mask=look, other=0
                )
                slot = block.to(tl.int64) * page + at % page
                other = tl.load(rows_of + slot, mask=look, other=-1)
                known = look & (other >= 0) & (other < rows)
                same = tl.load(slots + tl.maximum(other, 0), mask=known, other=-1) == slot
                found = tl.where(known & same, other.to(tl.int64), -2 - slot)
                found = tl.where(look, found, (row - back).to(tl.int64))
                found = tl.where(wanted, found, -1)
                tl.store(out + row * (TAPS - 1) + TAPS - 1 - back, found, mask=live)


def conv_sources(
    q_starts: Tensor,
    kv_lens: Tensor,
    pages: Tensor,
    slots: Tensor,
    page: int,
    rows_of: Tensor,
    out: Tensor,
) -> None:
    """See the contract: one launch for short steps, two for long ones."""
    check_rows("conv_sources", q_starts=q_starts, kv_lens=kv_lens, pages=pages, slots=slots,
               rows_of=rows_of, out=out)  # fmt: skip
    if not out.is_contiguous():
        raise ValueError(f"conv_sources: out needs rows without gaps; found {out.stride()}")
    check_shapes("conv_sources", "out TK, slots T, kv_lens B, q_starts S, pages BP", out, slots,
                 kv_lens, q_starts, pages[: len(kv_lens)], S=len(kv_lens) + 1)  # fmt: skip
    check_table(pages, kv_lens, page)
    rows, requests = out.shape[0], kv_lens.shape[0]
    if rows == 0:
        return
    if requests == 0:
        out.fill_(-1)
        return
    block = 256
    # A program that does both stays quick up to a few blocks.
    phases = ((True, True),) if rows <= 4 * block else ((True, False), (False, True))
    for scatter, gather in phases:
        _sources_kernel[(1 if scatter and gather else ceil_div(rows, block),)](
            q_starts, kv_lens, pages, slots, rows_of, out, rows, requests, requests.bit_length(),
            page, pages.stride(0), TAPS=out.shape[1] + 1, BLOCK=block, SCATTER=scatter,
            GATHER=gather, num_warps=4,
        )  # fmt: skip


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


@triton.jit(do_not_specialize=["rows"])
def _conv_kernel(
    partial, extra, residual, conv_weight, norm_weight, normed, summed, state, slots, sources, rows,
    page, partial_stride, extra_stride, residual_stride, weight_stride_c, weight_stride_k,
    state_stride_b, state_stride_t, state_stride_g, state_stride_w, eps, H: tl.constexpr,
    W: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, HAS_EXTRA: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Without a residual (a channel shard), `summed` receives the convolution itself."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < H
    in_state = (channel // W) * state_stride_g + (channel % W) * state_stride_w
    taps = load_weight(
        conv_weight, channel, inside, weight_stride_c, weight_stride_k, TAPS - 1, PACKED
    )
    if HAS_NORM:
        gain = tl.load(norm_weight + channel, mask=inside, other=0.0)
    older = ()
    if EARLY:
        row = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + row)
        for back in tl.static_range(1, TAPS):
            source = tl.load(sources + row * (TAPS - 1) + TAPS - 1 - back)
            from_slot = tl.maximum(-2 - source, 0)
            cell = state + (from_slot // page) * state_stride_b
            cell += (from_slot % page) * state_stride_t
            cached = channel < tl.where((slot >= 0) & (source < -1), H, 0)
            # The compiler knows no other way to grow a tuple.
            value = tl.load(cell + in_state, mask=cached, other=0.0)
            older = older + (value,)  # type: ignore[assignment]  # noqa: RUF005
        if HAS_RESIDUAL:
            carried = tl.load(residual + row * residual_stride + channel, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        if row < rows:
            slot = tl.load(slots + row)
            real = slot >= 0
            z = tl.load(partial + row * partial_stride + channel, mask=inside, other=0.0)
            if HAS_EXTRA:
                more = tl.load(extra + row * extra_stride + channel, mask=inside, other=0.0)
                z = (z.to(tl.float32) + more.to(tl.float32)).to(z.dtype)
            if HAS_RESIDUAL and not EARLY:
                carried = tl.load(
                    residual + row * residual_stride + channel, mask=inside, other=0.0
                )
            wide = z.to(tl.float32)
            total = wide + tl.where(real, wide * tap_weight(taps, PACKED, TAPS - 1), 0.0)
            for back in tl.static_range(1, TAPS):
                # One branch for the whole row, so a tap is read once, from where it is. (A select
                # of pointers would do too, but Triton 3.6 cannot compile it for AMD.)
                source = tl.load(sources + row * (TAPS - 1) + TAPS - 1 - back)
                value = tl.zeros((BLOCK,), dtype=z.dtype)
                if EARLY:
                    value = older[back - 1].to(z.dtype)
                if real:
                    if source >= 0:
                        value = tl.load(
                            partial + source * partial_stride + channel, mask=inside, other=0.0
                        )
                        if HAS_EXTRA:
                            more = tl.load(
                                extra + source * extra_stride + channel, mask=inside, other=0.0
                            )
                            value = (value.to(tl.float32) + more.to(tl.float32)).to(z.dtype)
                    elif (source < -1) and (not EARLY):
                        from_slot = -2 - source
                        cell = state + (from_slot // page) * state_stride_b
                        cell += (from_slot % page) * state_stride_t
                        value = tl.load(cell + in_state, mask=inside, other=0.0).to(z.dtype)
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
    if order_is_fixed() or rows <= 2 * compute_units():
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
    sources: Tensor,
) -> tuple[Tensor, Tensor]:
    check_rows("conv_residual_norm", partial=partial, extra=extra, residual=residual, slots=slots,
               sources=sources, norm_weight=norm_weight)  # fmt: skip
    check_shapes("conv_residual_norm", "partial TH=, extra TH=, residual TH=, norm_weight H, slots "
                 "T, conv_weight HK, sources TS, state BXGW=", partial, extra, residual,
                 norm_weight, slots, conv_weight, sources, state,
                 S=conv_weight.shape[1] - 1)  # fmt: skip
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
        partial, extra, residual, conv_weight.view(torch.int64) if packed else conv_weight,
        norm_weight, normed, summed, state, slots, sources, rows, state.shape[1], partial.stride(0),
        0 if extra is None else extra.stride(0), 0 if residual is None else residual.stride(0),
        conv_weight.stride(0), conv_weight.stride(1), state.stride(0), state.stride(1),
        state.stride(2), state.stride(3), eps, H=width, W=state.shape[3], TAPS=conv_weight.shape[1],
        BLOCK=block, ROWS=each, PACKED=packed, HAS_EXTRA=extra is not None,
        HAS_RESIDUAL=residual is not None, HAS_NORM=norm_here,
        EARLY=each == 1 and not is_rocm(), PDL=pdl(), **options(num_warps=warps),
    )  # fmt: skip
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
    sources: Tensor,
    group: str,
) -> tuple[Tensor, Tensor]:
    """See the contract: one launch on one rank, else two exchanges with a kernel at each step."""
    if not group:
        return _launch(partial, extra, residual, conv_weight, norm_weight, eps, state, slots,
                       sources)  # fmt: skip
    ranks = _process_group(group)
    shard = _reduce_scatter(partial, extra, ranks)
    _, branch = _launch(shard, None, None, conv_weight, None, eps, state, slots, sources)
    rows, width = residual.shape
    gathered = torch.empty(ranks.size() * rows, branch.shape[1], dtype=branch.dtype,
                           device=branch.device)  # fmt: skip
    torch.distributed.all_gather_into_tensor(gathered, branch, group=ranks)
    check_rows("conv_residual_norm", residual=residual, norm_weight=norm_weight)
    check_shapes("conv_residual_norm", "residual TH, norm_weight H", residual, norm_weight,
                 T=partial.shape[0], H=partial.shape[1])  # fmt: skip
    summed = torch.empty(rows, width, dtype=residual.dtype, device=residual.device)
    normed = summed[:0] if norm_weight is None else torch.empty_like(summed)
    add_norm(gathered, residual, norm_weight, eps, normed, summed, 0, branch.shape[1])
    return normed, summed


@triton.jit(do_not_specialize=["rows"])
def _by_rank_kernel(
    partial, extra, out, rows, partial_stride, extra_stride, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, HAS_EXTRA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    check_shapes("conv_residual_norm", "partial TH=, extra TH=", partial, extra)
    (rows, width), count = partial.shape, ranks.size()
    if width % count:
        raise ValueError(f"conv_residual_norm: {width} channels do not divide among {count} ranks; "
                         "use a tensor-parallel size that divides the hidden size")  # fmt: skip
    chunk = width // count
    by_rank = torch.empty(count * rows, chunk, dtype=partial.dtype, device=partial.device)
    if rows:
        block, warps = row_block("conv_residual_norm", chunk)
        _by_rank_kernel[(rows, count)](
            partial, extra, by_rank, rows, partial.stride(0),
            0 if extra is None else extra.stride(0), CHUNK=chunk, BLOCK=block,
            HAS_EXTRA=extra is not None, PDL=pdl(), **options(num_warps=warps),
        )  # fmt: skip
    out = torch.empty(rows, chunk, dtype=partial.dtype, device=partial.device)
    torch.distributed.reduce_scatter_tensor(out, by_rank, group=ranks)
    return out


def _process_group(name: str) -> ProcessGroup:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast(Any, name))
