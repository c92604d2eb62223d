"""A whole Inkling written with the resolved ops and nothing of the engine.

It reads a checkpoint in the original naming, keeps paged caches of its own, and runs any split of
any batch. Tests hold it to transformers; other tests use it as the oracle where transformers is
wrong (MTP) or slow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from inkling_portable.backends.reference.batch import Batch, make_batch
from inkling_portable.model.config import AttentionGeometry, InklingConfig, parse

EPS = 1e-6


def load_tensors(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the folder, in `dtype`."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found.update(load_file(file))
    return {name: x.to(dtype) if x.dtype.is_floating_point else x for name, x in found.items()}


@dataclass
class Group:
    """One cache group: page size, block tables by request, and what a step needs of them."""

    page: int
    width: int
    tables: list[list[int]]

    def step(self, batch: Batch, ids: list[int]) -> tuple[Tensor, Tensor]:
        rows = [self.tables[i] for i in ids]
        pages = torch.tensor(rows, dtype=torch.int32).reshape(len(ids), self.width)
        slots = torch.full((batch.rows,), -1, dtype=torch.int64)
        for t in range(batch.tokens):
            position, b = int(batch.positions[t]), int(batch.requests[t])
            slots[t] = rows[b][position // self.page] * self.page + position % self.page
        return pages, slots


class PlainInkling:
    """`ops` is what `registry.resolve` returns; room for `requests` of `length` tokens each."""

    def __init__(self, path: str | Path, ops: Any, dtype: torch.dtype = torch.float32, *,
                 requests: int = 1, length: int = 512, page: int = 16, conv_page: int = 4,
                 ) -> None:  # fmt: skip
        self.path, self.ops, self.dtype = Path(path), ops, dtype
        raw = json.loads((self.path / "config.json").read_text())
        self.config: InklingConfig = parse(raw)
        self.text = self.config.text
        self.weights = load_tensors(self.path, dtype)
        self.kv = self._group(page, requests, length)
        self.conv = self._group(conv_page, requests, length)
        self.lengths = [0] * requests
        blocks = [(f"llm.layers.{i}", self.text.attention(i)) for i in range(self.text.num_layers)]
        if self.config.mtp is not None:
            blocks += [(f"mtp.layers.{k}.transformer_block", self.config.mtp_attention(k))
                       for k in range(self.config.mtp.num_depths)]  # fmt: skip
        self.caches = {name: self._caches(geometry) for name, geometry in blocks}
        self.geometry = dict(blocks)

    def w(self, name: str) -> Tensor:
        return self.weights[f"model.{name}"]

    @staticmethod
    def _group(page: int, requests: int, length: int) -> Group:
        width = -(-length // page)
        order = torch.randperm(requests * width, generator=torch.Generator().manual_seed(page)) + 1
        return Group(page, width, order.reshape(requests, width).tolist())

    def _caches(self, g: AttentionGeometry) -> dict[str, Tensor]:
        def empty(group: Group, heads: int, width: int) -> Tensor:
            pages = 1 + sum(len(t) for t in group.tables)
            return torch.full((pages, group.page, heads, width), float("nan"), dtype=self.dtype)

        hidden = self.text.hidden_size // g.kv_heads
        return {
            "k": empty(self.kv, g.kv_heads, g.head_dim),
            "v": empty(self.kv, g.kv_heads, g.head_dim),
            "k_state": empty(self.conv, g.kv_heads, g.head_dim),
            "v_state": empty(self.conv, g.kv_heads, g.head_dim),
            "attn_state": empty(self.conv, g.kv_heads, hidden),
            "mlp_state": empty(self.conv, g.kv_heads, hidden),
        }

    def start(self, ids: list[int], lengths: list[int], padding: int = 0,
              contexts: list[int] | None = None) -> dict[str, Any]:  # fmt: skip
        """The step's batch arguments for new tokens of the requests `ids`."""
        contexts = [self.lengths[i] for i in ids] if contexts is None else contexts
        batch = make_batch(lengths, contexts, padding)
        conv_pages, conv_slots = self.conv.step(batch, ids)
        sources = torch.empty(batch.rows, self.text.conv_taps - 1, dtype=torch.int64)
        cells = self.conv.page * (1 + sum(len(t) for t in self.conv.tables))
        self.ops.conv_sources(
            batch.q_starts, batch.kv_lens, conv_pages, conv_slots, self.conv.page,
            torch.zeros(cells, dtype=torch.int32), sources,
        )  # fmt: skip
        kv_pages, kv_slots = self.kv.step(batch, ids)
        return {"batch": batch, "sources": sources, "conv_slots": conv_slots,
                "kv_pages": kv_pages, "kv_slots": kv_slots}  # fmt: skip

    def forward(self, ids: list[int], tokens: list[list[int]], padding: int = 0,
                rows: Tensor | None = None) -> Tensor:  # fmt: skip
        """Final-normed hidden states [T, H] of new `tokens` for the requests `ids`.

        `rows` replaces the embedding rows where it is not NaN (images and audio).
        """
        step = self.start(ids, [len(t) for t in tokens], padding)
        flat = torch.tensor([t for ts in tokens for t in ts] + [0] * padding, dtype=torch.int64)
        x = self.ops.embed_norm(
            flat, self.w("llm.embed.weight"), self.w("llm.embed_norm.weight"), EPS
        )
        if rows is not None:
            x = torch.where(rows.isnan(), x, rows.to(x.dtype))
        names = [f"llm.layers.{i}" for i in range(self.text.num_layers)]
        normed, _ = self.ops.rms_norm(x, self.w(f"{names[0]}.attn_norm.weight"), EPS, None)
        for i, name in enumerate(names):
            last = i + 1 == len(names)
            following = "llm.norm.weight" if last else f"{names[i + 1]}.attn_norm.weight"
            normed, x = self.block(name, normed, x, self.w(following), step, self.text.log_floor)
        for i, new in zip(ids, tokens, strict=True):
            self.lengths[i] += len(new)
        return normed

    def block(self, name: str, normed: Tensor, residual: Tensor, following: Tensor | None,
              step: dict[str, Any], log_floor: float) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One decoder layer; `following` is the norm that comes after it."""
        g, batch, caches = self.geometry[name], step["batch"], self.caches[name]
        attn = f"{name}.attn"
        projections = [self.w(f"{attn}.{p}.weight") for p in ("wq_du", "wk_dv", "wv_dv", "wr_du")]
        q, rel = self.ops.qkvr_prep(
            normed @ torch.cat(projections).T,
            self.w(f"{attn}.k_sconv.weight").flatten(1),
            self.w(f"{attn}.v_sconv.weight").flatten(1),
            self.w(f"{attn}.q_norm.weight"),
            self.w(f"{attn}.k_norm.weight"),
            self.w(f"{attn}.rel_logits_proj.proj"),
            EPS,
            0.0 if g.window else float(log_floor or 0),
            self.text.log_alpha,
            caches["k_state"],
            caches["v_state"],
            step["conv_slots"],
            step["sources"],
            caches["k"],
            caches["v"],
            step["kv_slots"],
            batch.positions,
        )
        out = torch.empty_like(q)
        longest = max([0, *batch.lengths])
        self.ops.rel_attention(
            q, caches["k"], caches["v"], rel, step["kv_pages"], batch.q_starts, batch.kv_lens,
            longest, int(max([0, *batch.kv_lens.tolist()])), g.window, 1 / g.head_dim, out,
        )  # fmt: skip
        branch = out.flatten(1) @ self.w(f"{attn}.wo_ud.weight").T
        normed, residual = self._end(branch, residual, f"{name}.attn_sconv.weight",
                                     self.w(f"{name}.mlp_norm.weight"),
                                     caches["attn_state"], step)  # fmt: skip
        branch = self.mlp(f"{name}.mlp", normed)
        return self._end(
            branch, residual, f"{name}.mlp_sconv.weight", following, caches["mlp_state"], step
        )

    def _end(self, branch: Tensor, residual: Tensor, conv: str, norm: Tensor | None, state: Tensor,
             step: dict[str, Any]) -> tuple[Tensor, Tensor]:  # fmt: skip
        normed, residual = self.ops.conv_residual_norm(
            branch, None, residual, self.w(conv).flatten(1), norm, EPS, state, step["conv_slots"],
            step["sources"], "",
        )  # fmt: skip
        return normed, residual

    def mlp(self, name: str, x: Tensor) -> Tensor:
        if f"model.{name}.w13_dn.weight" in self.weights:
            inner = self.ops.swiglu(x @ self.w(f"{name}.w13_dn.weight").T, True, None)
            return (inner @ self.w(f"{name}.w2_md.weight").T) * self.w(f"{name}.global_scale")
        # The gate's bias and scale are float32 in every checkpoint; keep them in the wide type.
        wide = torch.promote_types(self.dtype, torch.float32)
        logits = self.ops.gate_logits(x, self.w(f"{name}.gate.weight"))
        weights, ids, gammas = self.ops.route(
            logits,
            self.w(f"{name}.gate.bias").to(wide),
            self.w(f"{name}.gate.global_scale").to(wide),
            self.text.top_k,
            self.text.route_scale,
        )
        w13, w2 = self.w(f"{name}.experts.w13_weight"), self.w(f"{name}.experts.w2_weight")
        experts = self.ops.routed_experts(
            x, ids, weights, w13, w2,
            None, None, None, None, "bf16", "bf16", True,
        )  # fmt: skip
        return experts + self.ops.sink_experts(
            x, self.w(f"{name}.shared_experts.shared_w13_weight"),
            self.w(f"{name}.shared_experts.shared_w2_weight"), gammas,
        )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, valid ids] from final hidden states."""
        full = hidden @ self.w("llm.unembed.weight").T / self.text.logit_divisor
        return full[:, : self.text.vocab_size]

    def draft_hidden(self, depth: int, ids: list[int], previous: Tensor, tokens: list[list[int]],
                     contexts: list[int], rows: Tensor | None = None) -> Tensor:  # fmt: skip
        """Teacher-forced hidden states of one MTP depth (spec 4.2).

        previous [T, H]: hidden states of depth - 1 (depth 0: the trunk's final-normed ones) at
        positions `contexts[i]` and on; tokens: for each position p the token p + 1 + depth. `rows`
        replaces the tokens' embedding rows where it is not NaN (images and audio).
        """
        assert self.config.mtp is not None
        name = f"mtp.layers.{depth}"
        step = self.start(ids, [len(t) for t in tokens], contexts=contexts)
        flat = torch.tensor([t for ts in tokens for t in ts], dtype=torch.int64)
        embed, backbone = self.w("llm.embed.weight"), self.w("llm.embed_norm.weight")
        gains = self.w(f"{name}.hidden_norm.weight"), self.w(f"{name}.embed_norm.weight")
        if rows is None:
            combined = self.ops.embed_norm_chain(previous, flat, embed, backbone, *gains, EPS)
        else:
            embeds = self.ops.embed_norm(flat, embed, backbone, EPS)
            embeds = torch.where(rows.isnan(), embeds, rows.to(embeds.dtype))
            combined = self.ops.concat_norms(previous, embeds, *gains, EPS)
        x = combined @ self.w(f"{name}.input_proj.weight").T
        block = f"{name}.transformer_block"
        normed, _ = self.ops.rms_norm(x, self.w(f"{block}.attn_norm.weight"), EPS, None)
        chain = self.w("mtp.chain_norm.weight") if self.config.mtp.chain_norm else None
        normed, x = self.block(block, normed, x, chain, step, self.text.log_floor)
        return x if chain is None else normed
