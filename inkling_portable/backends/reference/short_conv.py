"""Contracts of the short convolution: conv_sources and conv_residual_norm.

The state of a stream is a paged cache of its *inputs*, addressed by absolute position (spec 3.3):
a rejected draft is overwritten when its position runs again, and a fresh request needs no clearing
since taps before position 0 are zero.

Where a tap comes from is the same for all layers of a step, so it is found once. It cannot be told
from the request alone: the engine may let a request start on a prefix that another one computes in
the same step, and then the row of the other is the source, not the state that it is about to write.
"""

from typing import Any, cast

import torch
from torch import Tensor

from inkling_portable.backends.reference._common import acc, rms, store
from inkling_portable.backends.reference.batch import Batch, Paged, draw_batch, draw_pages, poison
from inkling_portable.inputs import Draw
from inkling_portable.numerics import exact, within_twice_baseline
from inkling_portable.registry import op


def _sources_inputs(draw: Draw) -> dict[str, Any]:
    batch = draw_batch(draw)
    paged = draw_pages(draw, batch, page=draw.choice((4, 8, 32, 5)), window=4, share=True)
    cells = paged.count * paged.page
    stale = draw.tensor((cells,), torch.float32) * 9
    return {
        "q_starts": batch.q_starts,
        "kv_lens": batch.kv_lens,
        "pages": paged.pages,
        "slots": paged.slots,
        "page": paged.page,
        "rows_of": stale.int(),  # what earlier steps left there
        "out": torch.full((batch.rows, draw.choice((3, 1))), 77, dtype=torch.int64),
    }


@op(inputs=_sources_inputs, tolerance=exact(), mutates=("rows_of", "out"))
def conv_sources(
    q_starts: Tensor,
    kv_lens: Tensor,
    pages: Tensor,
    slots: Tensor,
    page: int,
    rows_of: Tensor,
    out: Tensor,
) -> None:
    """Where every row of a step finds its earlier taps, for all layers of one cache group.

    q_starts [B + 1], kv_lens [B] (new tokens included), pages [B, P], all int32; slots [T] int64,
    -1 for padding; page: tokens of a block. rows_of [blocks * page] int32 is scratch that may hold
    anything: it maps slots to this step's rows. out [T, K - 1] int64, oldest tap first: a row of
    this step (>= 0), -1 for zero (before the request's start, or a padding row), or the state's
    slot s as -2 - s.
    """
    out.fill_(-1)
    if out.shape[0] == 0 or kv_lens.shape[0] == 0:
        return
    row = torch.arange(out.shape[0], device=out.device)
    written = slots >= 0
    rows_of[slots[written]] = row[written].int()
    request = torch.searchsorted(q_starts, row.int(), right=True) - 1
    real = row < q_starts[-1]
    request = torch.where(real, request, 0)
    position = kv_lens[request] - q_starts[request + 1] + row
    back = torch.arange(out.shape[1], 0, -1, device=out.device)
    older, source = position[:, None] - back, row[:, None] - back
    at = torch.where(real[:, None], older, 0).clamp_min(0)
    slot = pages[request[:, None], at // page].long() * page + at % page
    other = rows_of[slot].long()
    shared = (other >= 0) & (other < len(row)) & (slots[other.clamp(0, len(row) - 1)] == slot)
    found = torch.where(shared, other, -2 - slot)
    found = torch.where(source >= q_starts[request][:, None], source, found)
    out.copy_(torch.where(real[:, None] & (older >= 0), found, -1))


def sources_of(batch: Batch, paged: Paged, taps: int) -> Tensor:
    """`conv_sources` for a drawn batch."""
    out = torch.empty(batch.rows, taps - 1, dtype=torch.int64)
    rows_of = torch.zeros(paged.count * paged.page, dtype=torch.int32)
    conv_sources(batch.q_starts, batch.kv_lens, paged.pages, paged.slots, paged.page, rows_of, out)
    return out


def causal_conv(z: Tensor, weight: Tensor, state: Tensor, slots: Tensor, sources: Tensor) -> Tensor:
    """Depthwise causal convolution with inner residual; writes the inputs `z` to `state`.

    z [T, C]; weight [C, K], tap K-1 for the current token; state [blocks, block, G, W] with
    G * W = C; slots [T] int64; sources [T, K - 1] int64 from `conv_sources` -> [T, C].
    Padding rows (slot -1) come back unchanged.
    """
    if z.shape[0] == 0:
        return z.clone()
    block = state.shape[1]
    kernel = acc(weight).to(acc(z).dtype)
    at = (-2 - sources).clamp_min(0)
    cached = state[at // block, at % block].flatten(2).to(z.dtype)
    history = torch.where((sources >= 0)[..., None], z[sources.clamp_min(0)], cached)
    history = acc(history).masked_fill_((sources == -1)[..., None], 0)
    total = acc(z) * (1 + kernel[:, -1]) + (history * kernel[:, :-1].T).sum(1)
    write = slots >= 0
    at = slots[write]
    state[at // block, at % block] = z[write].reshape(-1, *state.shape[2:]).to(state.dtype)
    return torch.where(write[:, None], store(total, z), z)


def draw_stream(draw: Draw, batch: Batch) -> tuple[Paged, int, int, int]:
    """Block table, groups G, width W per group and taps K of one convolution stream."""
    page = draw.choice((4, 8, 32, 5))
    paged = draw_pages(draw, batch, page=page, window=4, share=True)
    return paged, draw.choice((1, 2, 3)), draw.choice((16, 64, 7)), draw.choice((4, 2))


def _conv_inputs(draw: Draw) -> dict[str, Any]:
    dtype = draw.choice((torch.float32, torch.bfloat16))
    batch = draw_batch(draw)
    paged, groups, width, taps = draw_stream(draw, batch)
    hidden, shape = groups * width, (batch.rows, groups * width)
    normed = draw.choice((True, True, False))
    return {
        "partial": poison(draw.tensor(shape, dtype), batch),
        "extra": poison(draw.tensor(shape, dtype), batch) if draw.choice((False, True)) else None,
        "residual": poison(draw.tensor(shape, dtype), batch),
        "conv_weight": draw.tensor((hidden, taps), dtype),
        "norm_weight": draw.tensor((hidden,), dtype, "gain") if normed else None,
        "eps": 1e-6,
        "state": paged.cache(draw, groups, width, dtype),
        "slots": paged.slots,
        "sources": sources_of(batch, paged, taps),
        "group": "",
    }


@op(
    inputs=_conv_inputs,
    tolerance=(within_twice_baseline(), within_twice_baseline(), exact()),
    mutates=("state",),
)
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
    """End of a branch: sum the partials, short convolution, residual add, next norm (spec 2.2, 3).

    partial, extra, residual [T, H]: this rank's shares of the branch output and the replicated
    residual. conv_weight [H / ranks, K]: this rank's contiguous channels. norm_weight [H], or None
    where no norm follows. state, slots and sources as in `causal_conv`; `group` names the process
    group whose ranks hold the other partials, "" for one rank.
    -> (normed [T, H], or [0, H] without a norm; new residual [T, H]).
    """
    total = partial if extra is None else store(acc(partial) + acc(extra), partial)
    if group:
        total = _reduce_scatter(total, group)
    branch = causal_conv(total, conv_weight, state, slots, sources)
    if group:
        branch = _all_gather(branch, group)
    summed = store(acc(residual) + acc(branch), residual)
    normed = summed[:0] if norm_weight is None else rms(summed, norm_weight, eps)
    return normed, summed


def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    """[T, H] partial sums -> this rank's contiguous channels [T, H / ranks]."""
    ranks = _process_group(group)
    out = x.new_empty(x.shape[1] // ranks.size(), x.shape[0])
    torch.distributed.reduce_scatter_tensor(out, x.t().contiguous(), group=ranks)
    return out.t().contiguous()


def _all_gather(x: Tensor, group: str) -> Tensor:
    """[T, H / ranks] -> [T, H], channels in rank order."""
    ranks = _process_group(group)
    out = x.new_empty(x.shape[1] * ranks.size(), x.shape[0])
    torch.distributed.all_gather_into_tensor(out, x.t().contiguous(), group=ranks)
    return out.t().contiguous()


def _process_group(name: str) -> "torch.distributed.ProcessGroup":
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast(Any, name))
