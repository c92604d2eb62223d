"""Convolution state as a cache layer of the engine, and the metadata of a step.

The four streams of a decoder layer (K, V, attention output, MLP output) keep their last inputs in
one paged cache that vLLM manages like a sliding-window attention layer whose window is the number
of taps. A page row packs, for every KV head, K | V | attention | MLP. Rows are addressed by
absolute position, so prefix hits, rejected drafts and preemption need no work here. vLLM may
enlarge the block to unify page sizes: every index uses the block size of the bound cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from inkling_portable.model.config import AttentionGeometry, ConfigError
from inkling_portable.model.engine import (
    CacheBackend,
    CacheLayer,
    CommonAttentionMetadata,
    KVCacheSpec,
    MetadataBuilder,
    SlidingWindowSpec,
    VllmConfig,
    all_reduce,
    kept_window,
    step_metadata,
)
from inkling_portable.model.settings import Settings

# Streams in the order in which a page row packs them.
K, V, ATTENTION, MLP = range(4)


@dataclass
class ConvMetadata:
    """One step of one cache group; rows are padded to the widest step, so slice by row count."""

    slots: Tensor  # [rows] int64, -1 in padding
    sources: Tensor  # [rows, K - 1] int64: where each row's earlier taps are, see op conv_sources
    _cut: tuple[Tensor, Tensor] | None = None

    def first(self, rows: int) -> tuple[Tensor, Tensor]:
        """(slots, sources) of the first `rows`; all layers of a step ask for as many."""
        if self._cut is None or self._cut[0].shape[0] != rows:
            self._cut = self.slots[:rows], self.sources[:rows]
        return self._cut


class ConvMetadataBuilder(MetadataBuilder):
    """Finds the taps of a step's rows once for a group's layers, in buffers of fixed address."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots = torch.full((self.rows,), -1, dtype=torch.int64, device=self.device)
        state = self.layers[0]
        self.sources = torch.full(
            (self.rows, state.taps - 1), -1, dtype=torch.int64, device=self.device
        )
        self.rows_of = torch.empty(0, dtype=torch.int32, device=self.device)
        self.filled = 0

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ConvMetadata:  # fmt: skip
        step, state = common_attn_metadata, self.layers[0]
        before, rows = self.filled, step.slot_mapping.shape[0]
        self.filled = fill_slots(self.slots, step.slot_mapping, before)
        if self.rows_of.shape[0] != state.cells:  # the cache is bound after the builder is made
            self.rows_of = self.slots.new_zeros(state.cells, dtype=torch.int32)
        if state.cells:
            state.ops.conv_sources(
                step.query_start_loc, step.seq_lens, self.table(step), self.slots[:rows],
                state.block, self.rows_of, self.sources[:rows],
            )  # fmt: skip
            if before > rows:
                self.sources[rows:before].fill_(-1)
        return ConvMetadata(self.slots, self.sources)


def fill_slots(buffer: Tensor, slots: Tensor, before: int) -> int:
    """Copy a step's slots and mark the rows behind them: a graph may replay more rows than that.

    Of those only the rows that a wider step before has left, `before` in all, are not marked yet.
    """
    count = slots.shape[0]
    buffer[:count].copy_(slots)
    if before > count:
        buffer[count:before].fill_(-1)
    return count


class ConvBackend(CacheBackend):
    cell_factor: ClassVar[int] = 1  # the head size holds all four streams

    @staticmethod
    def get_name() -> str:
        return "INKLING_CONV_STATE"

    @staticmethod
    def get_builder_cls() -> type[ConvMetadataBuilder]:
        return ConvMetadataBuilder


class ConvState(CacheLayer):
    """The cache of one decoder layer's four streams."""

    backend = ConvBackend

    def __init__(self, settings: Settings, geometry: AttentionGeometry, prefix: str) -> None:
        super().__init__(prefix)
        self.settings = settings
        self.ops = settings.ops()
        self.taps = settings.text.conv_taps
        _, self.kv_heads = settings.per_rank(geometry)
        channels = settings.text.hidden_size // settings.tp
        if channels % self.kv_heads:
            raise ConfigError(
                f"hidden_size {settings.text.hidden_size} needs to be a multiple of the "
                f"{geometry.kv_heads} KV heads, between which the convolution state is divided; "
                "change one of them"
            )
        part = channels // self.kv_heads
        widths = (geometry.head_dim, geometry.head_dim, part, part)
        starts = (0, widths[0], 2 * widths[0], 2 * widths[0] + part)
        self.parts = tuple(zip(starts, widths, strict=True))
        # A power of two makes all pages of a model commensurable, so that vLLM enlarges blocks
        # instead of padding pages.
        self.cell = 1 << (sum(widths) - 1).bit_length()
        self.streams: tuple[Tensor, ...] = ()
        self.block = self.cells = 0

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return SlidingWindowSpec(
            block_size=self.taps,
            num_kv_heads=self.kv_heads,
            head_size=self.cell,
            head_size_v=0,
            dtype=self.settings.dtype,
            sliding_window=kept_window(vllm_config, self.taps),
        )

    def on_bound(self, cache: Tensor) -> None:
        tokens_first = cache.transpose(1, 2)  # [blocks, block, G, cell]
        self.block = cache.shape[2]
        self.cells = cache.shape[0] * self.block
        self.streams = tuple(tokens_first[..., at : at + width] for at, width in self.parts)


class ShortConv(nn.Module):
    """Taps of one stream: [channels of this rank, K], the last tap for the current token."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps), requires_grad=False)


class BranchEnd(ShortConv):
    """End of an attention or MLP branch: sum over ranks, convolution, residual, next norm."""

    def __init__(self, settings: Settings, state: ConvState, stream: int) -> None:
        super().__init__(settings.text.hidden_size // settings.tp, settings.text.conv_taps)
        # In a tuple, so that the state is not a submodule of both branches.
        self._state = (state,)
        self.stream = stream
        self.group = settings.group
        self.eps = settings.text.norm_eps

    def forward(
        self, partial: Tensor, extra: Tensor | None, residual: Tensor, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """partial, extra, residual [T, H]; norm [H] or None -> (normed [T, H], residual [T, H])."""
        (state,) = self._state
        step = step_metadata()
        if step is None or not state.streams:
            return self._without_state(partial, extra, residual, norm)
        meta: ConvMetadata = step[state.prefix]
        return state.ops.conv_residual_norm(
            partial, extra, residual, self.weight, norm, self.eps, state.streams[self.stream],
            *meta.first(partial.shape[0]), self.group,
        )  # fmt: skip

    def _without_state(
        self, partial: Tensor, extra: Tensor | None, residual: Tensor, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Profiling: no cache and no batch, so the convolution is the identity."""
        branch = partial if extra is None else partial + extra
        if self.group:
            branch = all_reduce(branch)
        if norm is None:
            return branch[:0], residual + branch
        return self._state[0].ops.rms_norm(branch, norm, self.eps, residual)
