"""The draft module against the formulas of the specification, written out here in plain torch.

Transformers is no oracle for drafts: it skips the backbone's embedding norm and the depths' sliding
windows. The module is built and called as vLLM's speculators do, with caches of the engine's layout
bound to its layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inkling_portable.commands.tiny import write_tiny
from tests.vllm_cpu.conftest import Engine, prompt

EPS, DEPTHS, ROWS = 1e-6, 2, 45


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain


def conv(x: Tensor, taps: Tensor) -> Tensor:
    """x [T, C], taps [C, 1, 4]: x plus the taps over it and the three rows before."""
    padded = torch.cat([x.new_zeros(3, x.shape[1]), x])
    return x + sum(padded[j : j + len(x)] * taps[:, 0, j] for j in range(4))


@dataclass
class Formula:
    """The MTP depths of one checkpoint in one precision."""

    weights: dict[str, Tensor]
    config: dict[str, Any]

    def w(self, name: str) -> Tensor:
        return self.weights[f"model.{name}"]

    def depth(self, k: int, hidden: Tensor, ids: list[int]) -> Tensor:
        """hidden [T, H] of the depth before; ids: the token that each row is given."""
        at = f"mtp.layers.{k}"
        rows = rms(self.w("llm.embed.weight")[ids], self.w("llm.embed_norm.weight"))
        both = torch.cat(
            [
                rms(hidden, self.w(f"{at}.hidden_norm.weight")),
                rms(rows, self.w(f"{at}.embed_norm.weight")),
            ],
            dim=-1,
        )
        out = self.block(f"{at}.transformer_block", both @ self.w(f"{at}.input_proj.weight").T,
                         local=k in self.config["mtp_config"]["local_layer_ids"])  # fmt: skip
        if self.config["mtp_config"]["chain_hidden_post_norm"]:
            out = rms(out, self.w("mtp.chain_norm.weight"))
        return out

    def block(self, at: str, x: Tensor, local: bool) -> Tensor:
        a = rms(x, self.w(f"{at}.attn_norm.weight"))
        mixed = self.attention(f"{at}.attn", a, local) @ self.w(f"{at}.attn.wo_ud.weight").T
        x = x + conv(mixed, self.w(f"{at}.attn_sconv.weight"))
        m = rms(x, self.w(f"{at}.mlp_norm.weight")) @ self.w(f"{at}.mlp.w13_dn.weight").T
        inner = torch.nn.functional.silu(m[:, 0::2]) * m[:, 1::2]
        out = inner @ self.w(f"{at}.mlp.w2_md.weight").T * self.w(f"{at}.mlp.global_scale")
        return x + conv(out, self.w(f"{at}.mlp_sconv.weight"))

    def attention(self, at: str, a: Tensor, local: bool) -> Tensor:
        c, n = self.config, len(a)
        heads, kv_heads, width = (
            c[("swa_" if local else "") + name]
            for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        q, k, v, r = (
            a @ self.w(f"{at}.{p}.weight").T for p in ("wq_du", "wk_dv", "wv_dv", "wr_du")
        )
        k, v = conv(k, self.w(f"{at}.k_sconv.weight")), conv(v, self.w(f"{at}.v_sconv.weight"))
        q = rms(q.view(n, heads, width), self.w(f"{at}.q_norm.weight"))
        k = rms(k.view(n, kv_heads, width), self.w(f"{at}.k_norm.weight"))
        bias = r.view(n, heads, -1) @ self.w(f"{at}.rel_logits_proj.proj")
        out = torch.zeros_like(q)
        for p in range(n):
            gain = 1.0
            if not local:
                gain += c["log_scaling_alpha"] * math.log(
                    max(1, (p + 1) / c["log_scaling_n_floor"])
                )
            first = max(0, p + 1 - c["sliding_window_size"]) if local else 0
            for h in range(heads):
                group = h * kv_heads // heads
                scores = k[first : p + 1, group] @ q[p, h] * gain / width
                for j in range(first, p + 1):
                    if p - j < bias.shape[-1]:
                        scores[j - first] += bias[p, h, p - j] * gain
                out[p, h] = scores.softmax(0) @ v.view(n, kv_heads, width)[first : p + 1, group]
        return out.view(n, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        table = self.w("llm.unembed.weight")[: self.config["unpadded_vocab_size"]]
        return hidden / self.config["logits_mup_width_multiplier"] @ table.T


class Draft:
    """The module with its caches, driven one step at a time."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        from inkling_portable.model.engine import CacheLayer
        from inkling_portable.model.mtp import InklingMTP

        self.config = EngineArgs(
            model=str(folder), dtype="float32", max_model_len=512, block_size=16,
            speculative_config={"method": "mtp", "num_speculative_tokens": DEPTHS},
        ).create_engine_config()  # fmt: skip
        tensors = load_file(folder / "model.safetensors")
        with set_current_vllm_config(self.config):
            self.module = InklingMTP(vllm_config=self.config)
            # As from vLLM's iterator when the index does not name the MTP file.
            loaded = self.module.load_weights(iter(tensors.items()))
            assert loaded == {name for name, _ in self.module.named_parameters()}
            self.module.model.embed_tokens.weight.data = tensors["model.llm.embed.weight"]
            target = self.config.speculative_config.draft_model_config
            process_weights_after_loading(self.module, target, torch.device("cpu"))
            self.layers = [m for m in self.module.modules() if isinstance(m, CacheLayer)]
            self.builders = {}
            for layer in self.layers:
                spec = layer.get_kv_cache_spec(self.config)
                cell = spec.head_size + spec.head_size_v
                cache = torch.full((40, spec.block_size, spec.num_kv_heads, cell), float("nan"))
                layer.kv_cache = cache.transpose(1, 2)
                builder = layer.get_attn_backend().get_builder_cls()
                self.builders[layer.prefix] = builder(
                    spec, [layer.prefix], self.config, torch.device("cpu")
                )

    def step(self, depth: int, start: int, ids: list[int], hidden: Tensor) -> Tensor:
        """Rows at positions start, start + 1, ... of one request."""
        from vllm.forward_context import set_forward_context

        metadata = {
            name: builder.build(0, self.common(start, len(ids), builder.kv_cache_spec.block_size))
            for name, builder in self.builders.items()
        }
        positions = torch.arange(start, start + len(ids))
        with set_forward_context(metadata, self.config), torch.no_grad():
            return self.module(torch.tensor(ids), positions, hidden, spec_step_idx=depth)

    def common(self, start: int, count: int, block: int) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, count], dtype=torch.int32)
        pages = torch.arange(1, 39, dtype=torch.int32).flip(0)[None]
        positions = torch.arange(start, start + count)
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts,
            seq_lens=torch.tensor([start + count], dtype=torch.int32), num_reqs=1,
            num_actual_tokens=count, max_query_len=count, max_seq_len=start + count,
            block_table_tensor=pages,
            slot_mapping=pages[0, positions // block].long() * block + positions % block,
        )  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["no chain norm", "chain norm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a local and a global depth, with and without the shared norm."""
    folder = tmp_path_factory.mktemp("mtp")
    write_tiny(folder, preset="text", dtype="float32", mtp_depths=DEPTHS, force=True)
    if request.param:
        config = json.loads((folder / "config.json").read_text())
        config["mtp_config"]["chain_hidden_post_norm"] = True
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "mtp.safetensors")
        gain = 1 + torch.randn(config["hidden_size"], generator=torch.manual_seed(5)) / 4
        save_file({**tensors, "model.mtp.chain_norm.weight": gain}, folder / "mtp.safetensors")
    return folder


def formula(folder: Path, dtype: torch.dtype) -> Formula:
    weights = {}
    for name in ("model.safetensors", "mtp.safetensors"):
        weights |= {k: v.to(dtype) for k, v in load_file(folder / name).items()}
    return Formula(weights, json.loads((folder / "config.json").read_text()))


def test_depths_follow_the_formulas(engines: Callable[..., Engine], folder: Path) -> None:
    engines(block_size=16)  # its process groups serve the module too
    draft = Draft(folder)
    single, double = formula(folder, torch.float32), formula(folder, torch.float64)
    assert sorted(double.config["mtp_config"]["local_layer_ids"]) == [0]
    tokens = prompt(ROWS + DEPTHS)
    trunk = torch.randn(ROWS, double.config["hidden_size"], generator=torch.manual_seed(1))
    hidden, narrow, wide = trunk, trunk, trunk.double()
    for depth in range(DEPTHS):
        given = tokens[depth + 1 : depth + 1 + ROWS]
        chunks, start = [], 0
        for count in (5, 1, ROWS - 6):
            rows = slice(start, start + count)
            chunks.append(draft.step(depth, start, given[rows], hidden[rows]))
            start += count
        hidden = torch.cat(chunks)
        narrow, wide = single.depth(depth, narrow, given), double.depth(depth, wide, given)
        cost = (narrow.double() - wide).abs().max()
        assert (hidden.double() - wide).abs().max() <= 2 * cost, f"depth {depth}"

    draft.module.lm_head = engines(block_size=16).on_model(lambda model: model.lm_head)
    with torch.no_grad():
        logits = draft.module.compute_logits(hidden)
        top = draft.module.get_top_tokens(hidden.clone())
    wanted = double.logits(wide)
    cost = (single.logits(narrow).double() - wanted).abs().max()
    assert logits.shape == wanted.shape
    assert (logits.double() - wanted).abs().max() <= 2 * cost
    assert top.tolist() == wanted.argmax(-1).tolist()


def test_a_missing_depth_is_named(checkpoint: Path, tmp_path: Path) -> None:
    from inkling_portable.model.checkpoint import CheckpointError, Shard, check, plan_draft
    from inkling_portable.model.config import parse
    from inkling_portable.model.loading import read_headers

    config = parse(json.loads((checkpoint / "config.json").read_text()))
    files = read_headers(checkpoint)
    name = "model.mtp.layers.1.input_proj.weight"
    del files.shapes[name]
    wanted = plan_draft(config, files.shapes, Shard(), DEPTHS)
    with pytest.raises(CheckpointError, match=rf"{name} is missing .*mtp\.safetensors"):
        check(wanted, files.shapes, files.file_of, draft_depths=DEPTHS)
