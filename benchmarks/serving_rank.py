"""One tensor-parallel rank's share of a released Inkling, as a model that one GPU can serve.

Weights are dummies, so nothing is loaded; routers are drawn anew after the start, because with
dummy routers nearly all tokens choose the same experts. Floors are the bytes that a step must read
once, by part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from inkling_portable.commands import tiny_presets
from inkling_portable.commands.fit_memory import weights_per_gpu
from inkling_portable.commands.released_configs import released
from inkling_portable.model.config import InklingConfig, parse

SPLIT = ("num_attention_heads", "num_key_value_heads", "swa_num_attention_heads",
         "swa_num_key_value_heads", "dense_intermediate_size", "intermediate_size",
         "moe_intermediate_size", "vocab_size")  # fmt: skip
NVFP4 = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": None, "group_size": 16,
    "producer": {"name": "modelopt", "version": "0.30"},
    "ignore": ["*attn*", "*shared_experts*", "lm_head", "*embed*", "*unembed*",
               *(f"model.layers.{i}.mlp*" for i in range(3)), "*sconv*"],
}  # fmt: skip


def rank_config(model: str, tp: int, layers: int | None, weights: str) -> dict[str, Any]:
    """config.json of the text model that one of `tp` ranks holds, in its first `layers` layers."""
    whole = released(model)
    text = dict(whole["text_config"])
    for name in SPLIT:
        if name in text:
            text[name] = max(1, text[name] // tp)
    text["unpadded_vocab_size"] = text["vocab_size"]
    if layers is not None:
        text["num_hidden_layers"] = layers
        text["local_layer_ids"] = [i for i in text["local_layer_ids"] if i < layers]
    text |= {"architectures": ["InklingForCausalLM"], "mtp_config": whole["mtp_config"],
             "eos_token_id": 1}  # fmt: skip
    if weights == "nvfp4":
        text["quantization_config"] = NVFP4
    elif weights != "bf16":
        raise SystemExit(f"a rank is made with nvfp4 or bf16 experts; found {weights}")
    return text


def tiny_config() -> dict[str, Any]:
    """A model for trying this out on a CPU."""
    base = tiny_presets.preset("text")
    return tiny_presets.config(base, vocab=base.vocab, layers=base.layers, dtype="float32",
                               towers=False, mtp_depths=base.mtp_depths, overrides={})  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> InklingConfig:
    """A checkpoint folder without weights, and what its config says."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text("{}")
    return parse(config)


def draw_routers(model: torch.nn.Module) -> int:
    """Give every router of a served model, ours or the engine's, the same seeded weights.

    Rows of logits then have mean 0 and deviation about 1 and choose evenly. Returns their number.
    """
    found = 0
    for name, parameter in sorted(model.named_parameters()):
        if not name.endswith("gate.weight") or parameter.dim() != 2:
            continue
        dice = torch.Generator().manual_seed(found)
        drawn = torch.randn(parameter.shape, generator=dice) / parameter.shape[1] ** 0.5
        with torch.no_grad():
            parameter.copy_(drawn.to(parameter.dtype))
            for other, value in model.named_parameters():
                if other.rpartition(".")[0] == name.rpartition(".")[0]:
                    if other.endswith(".bias"):
                        value.zero_()
                    if other.endswith("global_scale"):
                        value.fill_(1.0)
        found += 1
    return found


def module_of(model: torch.nn.Module) -> str:
    """Where a served model is defined: whether it is ours."""
    return type(model).__module__


def watch_routers(model: torch.nn.Module) -> None:
    """Note in every router of a served model, ours or the engine's, what the next rows choose."""

    def watched(route: Any, gate: Any) -> Any:
        def noting(*given: Any) -> Any:
            found = route(*given)
            if found[1].shape[0] >= 64:
                gate.chosen = found[1][:64].unique().numel()
            return found

        return noting

    for module in model.modules():
        gate: Any = getattr(module, "gate", module)
        # Ours routes in the layer, the engine's in its gate.
        for name in ("_route", "select_experts"):
            if hasattr(module, name) and hasattr(gate, "global_scale"):
                setattr(module, name, watched(getattr(module, name), gate))


def chosen_experts(model: torch.nn.Module) -> list[int]:
    """What `watch_routers` noted, layer by layer. The engine's count has its always-active ones."""
    return [module.chosen for module in model.modules() if hasattr(module, "chosen")]


def floors_us(
    config: InklingConfig, weights: str, batch: int, context: int, bandwidth: float, drafts: int = 0
) -> dict[str, float]:
    """Microseconds that each part of a decode step takes at `bandwidth` bytes a second.

    With `drafts` each request has so many rows more, which may choose other experts, and each
    draft takes a depth and the head once more.
    """
    text = config.text
    parts = dict(weights_per_gpu(config, weights, 1, drafts))
    parts.pop("embedding (on every GPU)", None)
    parts.pop("towers", None)
    used = 1 - (1 - text.top_k / text.num_experts) ** (batch * (1 + drafts))
    parts["routed experts"] = int(parts["routed experts"] * used)
    if drafts:
        parts["draft depths"] += drafts * parts["unembedding"]
    layers = [(text.layer_is_local(i), text.geometry(text.layer_is_local(i)))
              for i in range(text.num_layers)]  # fmt: skip
    layers += [(config.require_mtp().depth_is_local(i), config.mtp_attention(i))
               for i in range(drafts)]  # fmt: skip
    cells = 0
    for local, sizes in layers:
        seen = min(context, text.window) if local else context
        cells += batch * seen * 2 * sizes.kv_heads * sizes.head_dim
    parts["keys and values"] = 2 * cells
    return {name: 1e6 * size / bandwidth for name, size in parts.items()}
