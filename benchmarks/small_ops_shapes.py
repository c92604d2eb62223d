"""Arguments of every small op in the shapes that one rank of a served Inkling has.

Used by the benchmark, by the GPU tests and, on tensors without memory (device "meta"), by the
compile tests, so that what is timed is what is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inkling_portable.backends.reference.short_conv import conv_sources

BF16 = torch.bfloat16
FLOAT = torch.float32


@dataclass(frozen=True)
class Rank:
    """Widths of one rank: the hidden size is whole, heads and inner widths are its share."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    extent: int
    conv_groups: int  # heads of the conv cache: attention's kv heads
    conv_channels: int  # channels of an attn or mlp stream of this rank
    sink_width: int
    vocabulary: int


RANKS = {
    rank.name: rank
    for rank in (
        # Inkling, global and local layers, by tensor-parallel size.
        Rank("large-tp8-global", 6144, 8, 1, 1024, 8, 6144, 384, 25128),
        Rank("large-tp8-local", 6144, 8, 2, 512, 16, 6144, 384, 25128),
        Rank("large-tp4-global", 6144, 16, 2, 1024, 8, 6144, 768, 50256),
        Rank("large-tp4-local", 6144, 16, 4, 512, 16, 6144, 768, 50256),
        # Inkling-Small.
        Rank("small-tp2-global", 4096, 16, 4, 1024, 8, 4096, 1024, 100512),
        Rank("small-tp1-global", 4096, 32, 8, 1024, 8, 4096, 2048, 201024),
        Rank("small-tp1-local", 4096, 32, 8, 512, 8, 4096, 2048, 201024),
    )
}

OPS = ("rms_norm", "embed_norm", "embed_norm_chain", "concat_norms", "conv_sources",
       "conv_residual_norm", "qkvr_prep", "gate_logits", "route", "swiglu", "sink_experts",
       "gated_sinks", "skinny_linear", "norm_gelu", "dmel_embed_norm")  # fmt: skip
LAYERS = ("qkvr", "o_proj", "sinks", "lm_head")
"""Which linear layer `skinny_linear` is timed for."""


def normal(*shape: int, device: str, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    """Normal values times `scale`, drawn on the device."""
    if device == "meta":  # there each operation is a walk through decompositions
        return torch.empty(shape, device=device, dtype=dtype)
    return (torch.randn(shape, device=device, dtype=FLOAT) * scale).to(dtype)


def gain(width: int, device: str, dtype: torch.dtype = BF16) -> Tensor:
    """Norm weights near 1."""
    return (1 + 0.2 * torch.randn(width, device=device)).to(dtype)


class Arguments(dict[str, Any]):
    """Keyword arguments of an op, with the batch they came from for peers that want more of it."""

    batch: dict[str, Tensor]


def step(rows: int, decode: bool, device: str) -> tuple[dict[str, Tensor], int]:
    """Batch arguments, and how many conv blocks they need.

    `rows` requests of one new token at position 8191 each, or one request of `rows` tokens that
    continues at position 4096. No two requests share a block.
    """
    count, length = (rows, 1) if decode else (1, rows)
    first = 8191 if decode else 4096
    i32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    i64: dict[str, Any] = {"dtype": torch.int64, "device": device}
    row = torch.arange(rows, **i64)
    requests = row // length
    positions = first + row % length
    blocks = -(-(first + length) // 4)
    private = min(blocks, 8) if decode else blocks  # only the last ones are read
    pages = (
        1 + torch.arange(count, **i32)[:, None] * private + torch.arange(blocks, **i32) % private
    )
    slots = pages[requests, positions // 4].long() * 4 + positions % 4
    batch = {
        "q_starts": torch.arange(count + 1, **i32) * length,
        "kv_lens": torch.full((count,), first + length, **i32),
        "requests": requests.int(),
        "positions": positions,
        "pages": pages,
        "slots": slots,
        "sources": torch.empty(rows, 3, **i64),
    }
    blocks = 1 + count * private
    if device != "meta":
        conv_sources(**sources_arguments(batch, blocks))
    return batch, blocks


def sources_arguments(batch: dict[str, Tensor], blocks: int) -> dict[str, Any]:
    """Arguments of `conv_sources` that fill the batch's own sources."""
    named = {name: batch[name] for name in ("q_starts", "kv_lens", "pages", "slots")}
    rows_of = torch.zeros(4 * blocks, dtype=torch.int32, device=batch["slots"].device)
    return {**named, "page": 4, "rows_of": rows_of, "out": batch["sources"]}


def arguments(op: str, rows: int, rank: Rank, device: str, decode: bool = True,
              layer: str = "qkvr", dtype: torch.dtype = BF16) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of one op, private to this call."""
    h = rank.hidden
    kinds: dict[str, Any] = {"device": device, "dtype": dtype}
    if op == "rms_norm":
        return {"x": normal(rows, h, **kinds), "weight": gain(h, **kinds), "eps": 1e-6,
                "residual": normal(rows, h, **kinds)}  # fmt: skip
    if op in ("embed_norm", "embed_norm_chain"):
        table = normal(4096, h, **kinds)
        ids = torch.randint(0, 4096, (rows,), device=device)
        if op == "embed_norm":
            return {"ids": ids, "table": table, "weight": gain(h, **kinds), "eps": 1e-6}
        return {"hidden": normal(rows, h, **kinds), "ids": ids, "table": table,
                "backbone_weight": gain(h, **kinds), "hidden_weight": gain(h, **kinds),
                "embed_weight": gain(h, **kinds), "eps": 1e-6}  # fmt: skip
    if op == "concat_norms":
        return {"hidden": normal(rows, h, **kinds), "embeds": normal(rows, h, **kinds),
                "hidden_weight": gain(h, **kinds), "embed_weight": gain(h, **kinds),
                "eps": 1e-6}  # fmt: skip
    if op == "conv_sources":
        return sources_arguments(*step(rows, decode, device))
    if op == "conv_residual_norm":
        return _conv(rows, rank, device, decode, dtype)
    if op == "qkvr_prep":
        return _prep(rows, rank, device, decode, dtype)
    if op == "gate_logits":
        return {"x": normal(rows, h, **kinds), "weight": normal(264, h, scale=0.02, **kinds)[:258]}
    if op == "route":
        return {"logits": normal(rows, 258, device=device, dtype=FLOAT),
                "bias": normal(256, device=device, dtype=FLOAT, scale=0.1),
                "global_scale": normal(1, device=device, dtype=FLOAT).abs(), "top_k": 6,
                "route_scale": 8.0}  # fmt: skip
    if op == "swiglu":
        return {"gate_up": normal(rows, 4 * rank.sink_width, **kinds), "interleaved": True,
                "weight": None}  # fmt: skip
    if op == "sink_experts":
        width = rank.sink_width
        return {"x": normal(rows, h, **kinds),
                "w13": normal(2, 2 * width, h, scale=0.02, **kinds),
                "w2": normal(2, h, width, scale=0.02, **kinds),
                "gammas": normal(rows, 2, device=device, dtype=FLOAT).abs()}  # fmt: skip
    if op == "gated_sinks":
        gate, choice, sinks = (arguments(part, rows, rank, device, decode, layer, dtype)
                               for part in ("gate_logits", "route", "sink_experts"))  # fmt: skip
        return {"x": gate["x"], "gate": gate["weight"],
                **{name: choice[name] for name in ("bias", "global_scale", "top_k", "route_scale")},
                "w13": sinks["w13"], "w2": sinks["w2"]}  # fmt: skip
    if op == "skinny_linear":
        sizes = {"qkvr": (rank.heads * 144 + 2 * rank.kv_heads * 128, h),
                 "o_proj": (h, rank.heads * 128), "sinks": (4 * rank.sink_width, h),
                 "lm_head": (rank.vocabulary, h)}  # fmt: skip
        n, k = sizes[layer]
        return {"x": normal(rows, k, **kinds), "weight": normal(n, k, scale=0.02, **kinds)}
    if op == "norm_gelu":
        return {"x": normal(rows, 4800, **kinds), "weight": gain(4800, **kinds), "eps": 1e-6}
    if op == "dmel_embed_norm":
        return {"bins": torch.randint(0, 16, (rows, 80), device=device, dtype=torch.int32),
                "table": normal(1280, h, **kinds), "weight": gain(h, **kinds),
                "eps": 1e-6}  # fmt: skip
    raise ValueError(f"unknown op {op!r}; known are {', '.join(OPS)}")


def _conv(rows: int, rank: Rank, device: str, decode: bool, dtype: torch.dtype) -> Arguments:
    batch, blocks = step(rows, decode, device)
    h = rank.hidden
    kinds: dict[str, Any] = {"device": device, "dtype": dtype}
    each = rank.conv_channels // rank.conv_groups
    # K and V share the cache with the two wide streams, hence the offset and the gaps.
    cache = normal(blocks, rank.conv_groups, 4, 256 + each + 64, **kinds)
    a = Arguments(
        {
            "partial": normal(rows, h, **kinds),
            "extra": normal(rows, h, **kinds),
            "residual": normal(rows, h, **kinds),
            "conv_weight": normal(h, 4, scale=0.3, **kinds),
            "norm_weight": gain(h, **kinds),
            "eps": 1e-6,
            "state": cache.transpose(1, 2)[..., 256 : 256 + each],
            "slots": batch["slots"],
            "sources": batch["sources"],
            "group": "",
        }
    )
    a.batch = batch
    return a


def _prep(rows: int, rank: Rank, device: str, decode: bool, dtype: torch.dtype) -> Arguments:
    batch, blocks = step(rows, decode, device)
    kv = rank.kv_heads
    kinds: dict[str, Any] = {"device": device, "dtype": dtype}
    cache = normal(blocks, kv, 4, 320, **kinds).transpose(1, 2)
    pages = -(-rows // 128) + 1
    keys, values = (normal(pages, kv, 128, 128, **kinds).transpose(1, 2) for _ in range(2))
    a = Arguments(
        {
            "qkvr": normal(rows, rank.heads * 144 + 2 * kv * 128, **kinds),
            "k_conv": normal(kv * 128, 4, scale=0.3, **kinds),
            "v_conv": normal(kv * 128, 4, scale=0.3, **kinds),
            "q_norm": gain(128, **kinds),
            "k_norm": gain(128, **kinds),
            "rel_proj": normal(16, rank.extent, scale=0.3, **kinds),
            "eps": 1e-6,
            "log_floor": 128000.0 if rank.extent == 1024 else 0.0,
            "log_alpha": 0.1,
            "k_state": cache[..., :128],
            "v_state": cache[..., 128:256],
            "conv_slots": batch["slots"],
            "conv_sources": batch["sources"],
            "k_cache": keys,
            "v_cache": values,
            "kv_slots": 128 + torch.arange(rows, device=device),
            "positions": batch["positions"],
        }
    )
    a.batch = batch
    return a
