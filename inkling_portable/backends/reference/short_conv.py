"""Contracts of the short convolution: token_requests and conv_residual_norm.

The state of a stream is a paged cache of its *inputs*, addressed by absolute position (spec 3.3):
a rejected draft is overwritten when its position runs again, and a fresh request needs no clearing
since taps before position 0 are zero.
"""

from typing import Any

import torch
from torch import Tensor

from inkling_portable.backends.reference._common import acc, rms, store
from inkling_portable.backends.reference.batch import Batch, Paged, draw_batch, draw_pages, poison
from inkling_portable.inputs import Draw
from inkling_portable.numerics import exact, within_twice_baseline
from inkling_portable.registry import op


class Taps:
    """Where a step's rows and their older neighbours stand in the paged states of one group.

    Computed once for all streams that share a block table: `write` [T] selects the rows that are
    stored, `slot` indexes their places; `older` indexes the places of the K-1 tokens before each
    row, oldest first, and `missing` [T, K-1, 1] marks those before the start of a request.
    """

    def __init__(self, block: int, taps: int, slots: Tensor, pages: Tensor, requests: Tensor,
                 positions: Tensor) -> None:  # fmt: skip
        self.padding = (requests < 0)[:, None]
        self.write = slots >= 0
        at = slots[self.write]
        self.slot = at // block, at % block
        back = torch.arange(taps - 1, 0, -1, device=slots.device)
        position = (positions[:, None] - back).masked_fill_(self.padding, -1)
        self.missing = (position < 0)[..., None]
        position.clamp_min_(0)
        page = pages[requests.clamp_min(0)[:, None], position // block]
        self.older = page, position % block

    def convolve(self, z: Tensor, weight: Tensor, state: Tensor) -> Tensor:
        """Convolution with inner residual of z [T, C]; writes z to state [blocks, block, G, W].

        All rows are written before any older one is read. That covers rows of this step, of the
        same request and of others: the engine lets a request start on a prefix that another one
        computes in the same step.
        """
        state[self.slot] = z[self.write].reshape(-1, *state.shape[2:]).to(state.dtype)
        history = acc(state[self.older].flatten(2)).masked_fill(self.missing, 0)
        kernel = acc(weight).to(history.dtype)
        total = acc(z) * (1 + kernel[:, -1]) + (history * kernel[:, :-1].T).sum(1)
        return torch.where(self.padding, z, store(total, z))


def causal_conv(
    z: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    pages: Tensor,
    requests: Tensor,
    q_starts: Tensor,
    positions: Tensor,
) -> Tensor:
    """Depthwise causal convolution with inner residual; writes the inputs `z` to `state`.

    z [T, C]; weight [C, K], tap K-1 for the current token; state [blocks, block, G, W] with
    G * W = C; slots [T], -1 in padding rows only; pages [B, P]; requests, positions [T];
    q_starts [B + 1] -> [T, C]. Padding rows (request -1) come back unchanged.
    """
    if z.shape[0] == 0 or q_starts.numel() < 2:
        return z.clone()
    taps = Taps(state.shape[1], weight.shape[1], slots, pages, requests, positions)
    return taps.convolve(z, weight, state)


def draw_stream(draw: Draw, batch: Batch) -> tuple[Paged, int, int, int]:
    """Block table, groups G, width W per group and taps K of one convolution stream."""
    paged = draw_pages(draw, batch, page=draw.choice((4, 8, 32, 5)), window=4)
    return paged, draw.choice((1, 2, 3)), draw.choice((16, 64, 7)), draw.choice((4, 2))


def _token_requests_inputs(draw: Draw) -> dict[str, Any]:
    batch = draw_batch(draw)
    return {"q_starts": batch.q_starts, "out": torch.full((batch.rows,), -7, dtype=torch.int32)}


@op(inputs=_token_requests_inputs, tolerance=exact(), mutates=("out",))
def token_requests(q_starts: Tensor, out: Tensor) -> None:
    """Request of every row: q_starts [B + 1] int32; out [T] int32, -1 past the last."""
    rows = torch.arange(out.shape[0], device=out.device, dtype=torch.int32)
    request = torch.searchsorted(q_starts, rows, right=True) - 1
    out.copy_(torch.where(rows < q_starts[-1], request, -1))


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
        "pages": paged.pages,
        "requests": batch.requests,
        "q_starts": batch.q_starts,
        "positions": batch.positions,
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
    pages: Tensor,
    requests: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    group: str,
) -> tuple[Tensor, Tensor]:
    """End of a branch: sum the partials, short convolution, residual add, next norm (spec 2.2, 3).

    partial, extra, residual [T, H]: this rank's shares of the branch output and the replicated
    residual. conv_weight [H / ranks, K]: this rank's contiguous channels. norm_weight [H], or None
    where no norm follows. state and the batch arguments as in `causal_conv`; `group` names the
    process group whose ranks hold the other partials, "" for one rank.
    -> (normed [T, H], or [0, H] without a norm; new residual [T, H]).
    """
    total = partial if extra is None else store(acc(partial) + acc(extra), partial)
    if group:
        total = _reduce_scatter(total, group)
    branch = causal_conv(total, conv_weight, state, slots, pages, requests, q_starts, positions)
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
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    return _resolve_process_group(GroupName(name))
