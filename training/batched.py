"""Inkling over a batch of whole rows, differentiable and fast: what the trainer runs.

The maths is the spec's section 2 and 4.2 and that of the references; a test holds it to them. No
caches and no pages: every row starts at position 0, and attention is over the row. Local layers
attend block by block; global layers build the whole matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_portable.model.config import AttentionGeometry, InklingConfig
from inkling_portable.model.towers import fold

HIDDEN = -30000.0
"""Score of a key that is not visible; finite, and 0 after the softmax."""


class Media(NamedTuple):
    """The pictures and sounds of a batch, and the places of their rows among all B * L.

    patches [N, time, patch, patch, 3] normalised; levels [M, bins] int64; places [N + M] int64,
    those of the patches first.
    """

    patches: Tensor
    levels: Tensor
    places: Tensor


class BatchedInkling:
    """The trunk and the MTP depths over `weights`, by their checkpoint names.

    dtype: what products are computed in; norms, the softmax and the residual are in the dtype of
    the weights.
    """

    def __init__(
        self, config: InklingConfig, weights: dict[str, Tensor], dtype: torch.dtype
    ) -> None:
        self.config, self.text = config, config.text
        self.weights, self.dtype = weights, dtype
        self.loads: dict[str, Tensor] = {}
        """Tokens that chose each expert, [E], of the last pass, by the MLP's name."""

    def w(self, name: str) -> Tensor:
        return self.weights[f"model.{name}"]

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), weight.to(self.dtype))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.w(name)
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self.text.norm_eps)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, L, H] of token ids, normed."""
        rows = LookUp.apply(ids, self.w("llm.embed.weight"), self.dtype)
        return self.norm(rows, "llm.embed_norm.weight")

    def rows(self, ids: Tensor, media: Media | None = None) -> Tensor:
        """What enters the first layer, [B, L, H]: normed embeddings, and the towers' rows."""
        x = self.embed(ids)
        if media is None:
            return x
        tower = torch.cat([self.pictures(media.patches), self.sounds(media.levels)])
        flat = x.flatten(0, 1).index_copy(0, media.places, tower.to(x.dtype))
        return flat.view(x.shape)

    def pictures(self, patches: Tensor) -> Tensor:
        """[N, H] of normalised patches [N, time, patch, patch, 3]."""
        assert self.config.vision is not None
        stages, x = self.config.vision.stages(), patches
        for index, stage in enumerate(stages):
            name = f"visual.layers.linear_{index}.weight"
            x = self.linear(fold(x, stage.time, stage.side), self.w(name))
            if index < len(stages) - 1:
                x = F.gelu(self.norm(x, f"visual.layers.norm_{index}.weight"))
        return self.norm(x.flatten(1), "visual.final_norm.weight")

    def sounds(self, levels: Tensor) -> Tensor:
        """[N, H] of dMel levels [N, bins] (int64)."""
        assert self.config.audio is not None
        bins, count = self.config.audio.mel_bins, self.config.audio.mel_levels
        table = self.w("audio.encoder.weight")
        chosen = levels + torch.arange(bins, device=levels.device) * count
        several = torch.zeros(len(levels), len(table), device=levels.device, dtype=table.dtype)
        several = several.scatter(1, chosen, 1.0)
        return self.norm(self.linear(several, table.T), "audio.final_norm.weight")

    def trunk(self, rows: Tensor) -> Tensor:
        """Final-normed hidden states [B, L, H] of `rows`; L is a multiple of the window."""
        x = rows
        for layer in range(self.text.num_layers):
            dense = self.text.layer_is_dense(layer)
            x = self.block(f"llm.layers.{layer}", x, self.text.attention(layer), dense)
        return self.norm(x, "llm.norm.weight")

    def draft(self, depth: int, previous: Tensor, rows: Tensor) -> Tensor:
        """Hidden states [B, L, H] of one MTP depth.

        previous: the depth before, or the trunk's; rows: as for the trunk. The last positions,
        whose row would lie behind the end, are of no use.
        """
        name = f"mtp.layers.{depth}"
        shifted = F.pad(rows[:, 1 + depth :], (0, 0, 0, 1 + depth))
        hidden = self.norm(previous, f"{name}.hidden_norm.weight")
        embeds = self.norm(shifted, f"{name}.embed_norm.weight")
        x = self.linear(torch.cat([hidden, embeds], -1), self.w(f"{name}.input_proj.weight"))
        x = x.to(hidden.dtype)
        return self.block(f"{name}.transformer_block", x, self.config.mtp_attention(depth), True)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., padded vocabulary] in the dtype of products."""
        scaled = hidden / self.text.logit_divisor
        return self.linear(scaled, self.w("llm.unembed.weight"))

    def block(self, name: str, x: Tensor, sizes: AttentionGeometry, dense: bool) -> Tensor:
        branch = self.attention(f"{name}.attn", self.norm(x, f"{name}.attn_norm.weight"), sizes)
        x = x + conv(branch, self.w(f"{name}.attn_sconv.weight"))
        normed = self.norm(x, f"{name}.mlp_norm.weight")
        branch = (self.dense if dense else self.experts)(f"{name}.mlp", normed)
        return x + conv(branch, self.w(f"{name}.mlp_sconv.weight"))

    def attention(self, name: str, x: Tensor, sizes: AttentionGeometry) -> Tensor:
        rows, length, _ = x.shape
        heads, kv_heads, width = sizes.heads, sizes.kv_heads, sizes.head_dim
        parts = [self.w(f"{name}.{p}.weight") for p in ("wq_du", "wk_dv", "wv_dv", "wr_du")]
        fused = self.linear(x, torch.cat(parts))
        q, k, v, r = fused.split([part.shape[0] for part in parts], -1)
        k = conv(k, self.w(f"{name}.k_sconv.weight")).unflatten(-1, (kv_heads, width))
        v = conv(v, self.w(f"{name}.v_sconv.weight")).unflatten(-1, (kv_heads, width))
        q = self.norm(q.unflatten(-1, (heads, width)), f"{name}.q_norm.weight").to(self.dtype)
        k = self.norm(k, f"{name}.k_norm.weight").to(self.dtype)
        r = r.unflatten(-1, (heads, sizes.rel_dim))
        rel = self.linear(r, self.w(f"{name}.rel_logits_proj.proj").T)
        if not sizes.window and self.text.log_floor:
            steps = torch.arange(1, length + 1, device=x.device, dtype=x.dtype)
            tau = 1 + self.text.log_alpha * (steps / self.text.log_floor).clamp_min(1).log()
            tau = tau[None, :, None, None].to(self.dtype)
            q, rel = q * tau, rel * tau
        if heads != kv_heads:
            k, v = (_repeat(z, heads // kv_heads) for z in (k, v))
        mix = _local if sizes.window else _global
        out = mix(q, k, v, rel, sizes.window, 1 / width)
        return self.linear(out.reshape(rows, length, heads * width), self.w(f"{name}.wo_ud.weight"))

    def dense(self, name: str, x: Tensor) -> Tensor:
        inner = _swiglu(self.linear(x, self.w(f"{name}.w13_dn.weight")))
        down = self.linear(inner, self.w(f"{name}.w2_md.weight"))
        return down * self.w(f"{name}.global_scale").to(self.dtype)

    def experts(self, name: str, x: Tensor) -> Tensor:
        """Every expert on every token, those that were not chosen with weight 0."""
        count, sinks, width = self.text.num_experts, self.text.num_sinks, self.text.expert_width
        logits = F.linear(x, self.w(f"{name}.gate.weight"))
        opened = logits.sigmoid()
        with torch.no_grad():
            scores = opened[..., :count] + self.w(f"{name}.gate.bias")
            chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(self.text.top_k).indices, 1)
            self.loads[name] = chosen.sum((0, 1))
        active = torch.cat([chosen, torch.ones_like(opened[..., count:])], -1) * opened
        total = self.text.route_scale * self.w(f"{name}.gate.global_scale")
        share = (active / active.sum(-1, keepdim=True) * total).to(self.dtype)
        up = torch.cat(
            [
                self.w(f"{name}.experts.w13_weight").flatten(0, 1),
                self.w(f"{name}.shared_experts.shared_w13_weight").flatten(0, 1),
            ]
        )
        down = torch.cat(
            [
                self.w(f"{name}.experts.w2_weight"),
                self.w(f"{name}.shared_experts.shared_w2_weight"),
            ]
        )
        inner = _swiglu(self.linear(x, up)).unflatten(-1, (count + sinks, width))
        inner = (inner * share[..., None]).flatten(-2)
        return self.linear(inner, down.transpose(0, 1).flatten(1))


class LookUp(torch.autograd.Function):
    """Rows of an embedding table, whose gradient is a product.

    A few ids make most of a batch, which the usual sum by atomic additions or sorting is slow for.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size, ctx.dtype = len(table), dtype
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        places = torch.arange(ctx.size, device=ids.device)[:, None] == ids.flatten()
        summed = places.to(ctx.dtype) @ gradient.flatten(0, -2).to(ctx.dtype)
        return None, summed.to(gradient.dtype), None


def _repeat(x: Tensor, times: int) -> Tensor:
    """x [B, L, h, D] with every head `times` times."""
    return x[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3)


def conv(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, L, C] plus its causal depthwise convolution; weight [C, 1, K]."""
    taps, length = weight.shape[-1], x.shape[1]
    weight = weight.to(x.dtype)
    padded = F.pad(x, (0, 0, taps - 1, 0))
    out = x * (1 + weight[:, 0, taps - 1])
    for tap in range(taps - 1):
        out = torch.addcmul(out, padded[:, tap : tap + length], weight[:, 0, tap])
    return out


def _swiglu(x: Tensor) -> Tensor:
    """silu(even columns) * odd columns."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


def _attend(scores: Tensor, values: Tensor) -> Tensor:
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, -1, dtype=wide).to(values.dtype) @ values


def _local(
    q: Tensor, k: Tensor, v: Tensor, rel: Tensor, window: int, scale: float
) -> Tensor:  # fmt: skip
    """Attention in blocks of one window: each sees itself and the block before.

    q, k, v [B, L, h, D]; rel [B, L, h, window]; -> [B, L, h, D].
    """
    rows, length, heads, _ = q.shape
    blocks = length // window

    def cut(x: Tensor) -> Tensor:
        return x.unflatten(1, (blocks, window)).transpose(2, 3)

    def pairs(x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 0, 0, window, 0))[:, :length]
        return torch.cat([cut(before), cut(x)], 3)

    # Row i of a block sees columns i + 1 to i + window; distance e stands in column i + window - e.
    bias = F.pad(cut(rel).flip(-1), (1, window)).flatten(-2)[..., : 2 * window * window]
    scores = (cut(q) * scale) @ pairs(k).transpose(-1, -2)
    scores = scores + bias.unflatten(-1, (window, 2 * window))
    row = torch.arange(window, device=q.device)[:, None]
    column = torch.arange(2 * window, device=q.device)
    seen = (column > row) & (column <= row + window)
    seen = seen & ((torch.arange(blocks, device=q.device)[:, None, None] > 0) | (column >= window))
    mixed = _attend(scores.masked_fill(~seen[:, None], HIDDEN), pairs(v))
    return mixed.transpose(2, 3).reshape(rows, length, heads, -1)


def _global(
    q: Tensor, k: Tensor, v: Tensor, rel: Tensor, window: int, scale: float
) -> Tensor:  # fmt: skip
    """Attention over the whole row, with the bias of near distances; shapes as in `_local`."""
    length, extent = q.shape[1], rel.shape[-1]
    q, k, v, rel = (x.transpose(1, 2) for x in (q, k, v, rel))
    # Row i, distance e belongs into column i - e: shear the reversed bias by one a row.
    width = length + extent - 1
    bias = F.pad(rel.flip(-1), (0, length)).flatten(-2)[..., : length * width]
    bias = bias.unflatten(-1, (length, width))[..., extent - 1 :]
    scores = (q * scale) @ k.transpose(-1, -2) + bias
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    return _attend(scores.masked_fill(~seen, HIDDEN), v).transpose(1, 2)
