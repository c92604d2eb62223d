"""Attention: one fused projection, one preparation op, one paged attention op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inkling_portable.model.config import AttentionGeometry
from inkling_portable.model.engine import (
    CacheBackend,
    CacheLayer,
    CommonAttentionMetadata,
    FullAttentionSpec,
    KVCacheSpec,
    MergedColumnParallelLinear,
    MetadataBuilder,
    QuantizationConfig,
    RowParallelLinear,
    SlidingWindowSpec,
    VllmConfig,
    cache_dtype,
    eager_break,
    fp8_dtype,
    kept_window,
    step_metadata,
)
from inkling_portable.model.norm import Norm
from inkling_portable.model.settings import Settings
from inkling_portable.model.short_conv import ConvMetadata, ConvState, K, ShortConv, V, fill_slots


@dataclass
class AttentionMetadata:
    """One step of one cache group; `max_q` and `max_kv` are host upper bounds."""

    pages: Tensor  # [B, P] int32
    q_starts: Tensor  # [B + 1] int32
    kv_lens: Tensor  # [B] int32
    slots: Tensor  # [rows] int64, -1 in padding
    max_q: int
    max_kv: int


class AttentionMetadataBuilder(MetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots = torch.full((self.rows,), -1, dtype=torch.int64, device=self.device)
        self.filled = 0

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionMetadata:  # fmt: skip
        step = common_attn_metadata
        self.filled = fill_slots(self.slots, step.slot_mapping, self.filled)
        return AttentionMetadata(
            self.table(step), step.query_start_loc, step.seq_lens, self.slots,
            step.max_query_len, step.max_seq_len,
        )  # fmt: skip


class RelAttentionBackend(CacheBackend):
    @staticmethod
    def get_name() -> str:
        return "INKLING_REL_ATTENTION"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return AttentionMetadataBuilder


class RelLogits(nn.Module):
    """Projection of the relative query to one bias per backward distance: [d_rel, extent]."""

    def __init__(self, d_rel: int, extent: int) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.empty(d_rel, extent), requires_grad=False)


class InklingAttention(CacheLayer):
    """Local (sliding window) or global attention of one layer, by its geometry."""

    backend = RelAttentionBackend

    def __init__(
        self, settings: Settings, geometry: AttentionGeometry, conv_state: ConvState,
        quant_config: QuantizationConfig | None, prefix: str,
    ) -> None:  # fmt: skip
        super().__init__(prefix)
        text = settings.text
        self.settings, self.geometry = settings, geometry
        self.ops = settings.ops()
        self.heads, self.kv_heads = settings.per_rank(geometry)
        self.eps = text.norm_eps
        # Log-length scaling concerns layers that see the whole context.
        self.log_floor = 0.0 if geometry.window else float(text.log_floor)
        self.log_alpha = text.log_alpha
        self.qkvr = MergedColumnParallelLinear(
            text.hidden_size, list(geometry.split_sizes(settings.tp)), bias=False,
            quant_config=quant_config, prefix=f"{prefix}.qkvr", return_bias=False,
        )  # fmt: skip
        # The branch's convolution sums over ranks.
        self.wo_ud = RowParallelLinear(
            geometry.q_size, text.hidden_size, bias=False, quant_config=quant_config,
            reduce_results=False, prefix=f"{prefix}.wo_ud", return_bias=False,
        )  # fmt: skip
        self.rel_logits_proj = RelLogits(geometry.rel_dim, geometry.extent)
        self.q_norm = Norm(geometry.head_dim)
        self.k_norm = Norm(geometry.head_dim)
        self.k_sconv = ShortConv(self.kv_heads * geometry.head_dim, text.conv_taps)
        self.v_sconv = ShortConv(self.kv_heads * geometry.head_dim, text.conv_taps)
        # In a tuple, so that the state is not a submodule of the attention too.
        self._conv_state = (conv_state,)
        self.keys = self.values = torch.empty(0)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        shape: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": self.kv_heads,
            "head_size": self.geometry.head_dim,
            "dtype": cache_dtype(vllm_config),
        }
        if self.geometry.window:
            window = kept_window(vllm_config, self.geometry.window)
            return SlidingWindowSpec(**shape, sliding_window=window)
        return FullAttentionSpec(**shape)

    def on_bound(self, cache: Tensor) -> None:
        if cache.dtype == torch.uint8:
            cache = cache.view(fp8_dtype())
        tokens_first = cache.transpose(1, 2)  # [pages, page, Hkv, keys | values]
        self.keys, self.values = tokens_first.split(self.geometry.head_dim, dim=-1)
        self.ops = self.settings.ops(cache.shape[2])

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, H], positions [T] -> this rank's part of the branch output [T, H]."""
        return self.wo_ud(self.attend(self.qkvr(x), positions))

    def attend(self, qkvr: Tensor, positions: Tensor) -> Tensor:
        """Projected rows [T, q | k | v | r] of this rank, positions [T] -> [T, heads * D]."""
        rows = qkvr.shape[0]
        out = qkvr.new_empty((rows, self.heads, self.geometry.head_dim))
        step = step_metadata()
        if step is None or not self.keys.numel():
            return out.zero_().view(rows, -1)  # profiling: there is no cache to attend to
        (conv,) = self._conv_state
        meta: AttentionMetadata = step[self.prefix]
        conv_meta: ConvMetadata = step[conv.prefix]
        q, rel = self.ops.qkvr_prep(
            qkvr, self.k_sconv.weight, self.v_sconv.weight, self.q_norm.weight,
            self.k_norm.weight, self.rel_logits_proj.proj, self.eps, self.log_floor,
            self.log_alpha, conv.streams[K], conv.streams[V], *conv_meta.first(rows), self.keys,
            self.values, meta.slots[:rows], positions,
        )  # fmt: skip
        self._attend(q, rel, out)
        return out.view(rows, -1)

    @eager_break
    def _attend(self, q: Tensor, rel: Tensor, out: Tensor) -> None:
        # A captured graph calls this again on replay: the step's metadata is read here.
        step = step_metadata()
        assert step is not None
        meta: AttentionMetadata = step[self.prefix]
        self.ops.rel_attention(
            q, self.keys, self.values, rel, meta.pages, meta.q_starts, meta.kv_lens, meta.max_q,
            meta.max_kv, self.geometry.window, self.geometry.scale, out,
        )  # fmt: skip
