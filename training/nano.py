"""portable-nano: its config, its weights before training, and how it is written down."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inkling_portable.commands import tiny_presets, tiny_tensors
from inkling_portable.commands.eval_tasks import EXTENT, WINDOW
from inkling_portable.model.config import InklingConfig, parse
from training import tokenizer

MAX_LENGTH = 1536
DEPTHS = 2
SHAPE = tiny_presets.Preset(
    vocab=0,
    dtype="bfloat16",
    layers=12,
    period=6,
    global_at=5,
    towers=False,
    mtp_depths=DEPTHS,
    mtp_local=(0,),
    text={
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "d_rel": 8,
        "rel_extent": EXTENT,
        "sliding_window_size": WINDOW,
        "dense_mlp_idx": 2,
        "dense_intermediate_size": 256,
        "intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "route_scale": 2.5,
        "logits_mup_width_multiplier": 0.5,
        "log_scaling_n_floor": 256,
        "model_max_length": MAX_LENGTH,
    },
)
"""The ratios of the released models: five local layers to one global, two dense layers, a dense
width of four expert widths, a global draft depth after a local one, mup divisor H / 256. The gain
of long contexts sets in at 256 tokens, so that it is trained."""


PATCH, STAGES = 8, 4
"""Of the image tower: a patch of the released size would take 25 million parameters alone."""


def raw_config(towers: bool = False) -> dict[str, Any]:
    """config.json of portable-nano, of text alone or with the image and the audio tower."""
    raw = tiny_presets.config(
        SHAPE,
        vocab=tokenizer.vocabulary_size(),
        layers=SHAPE.layers,
        dtype=SHAPE.dtype,
        towers=towers,
        mtp_depths=SHAPE.mtp_depths,
        overrides={"n_shared_experts": SHAPE.text["n_shared_experts"]},
    )
    if towers:
        raw["vision_config"] |= {"patch_size": PATCH, "n_layers": STAGES}
    return raw


def processor() -> dict[str, Any]:
    """processor_config.json of the model with towers: pictures keep their size."""
    made = tiny_presets.processor_config()
    made["image_processor"] |= {
        "size": {"height": PATCH, "width": PATCH},
        "rescale_image_frac": 1.0,
    }
    return made


def has_towers(weights: dict[str, Tensor]) -> bool:
    """Whether weights include the image and the audio tower."""
    return any(name.startswith("model.visual.") for name in weights)


def specs(config: InklingConfig) -> list[tiny_tensors.TensorSpec]:
    """Names and shapes of every tensor."""
    return [*tiny_tensors.tensor_specs(config), *tiny_tensors.mtp_specs(config)]


def fresh_weights(config: InklingConfig, seed: int) -> dict[str, Tensor]:
    """Weights to start from, float32 on the CPU, by name.

    Those of the towers have a seed of their own, so that others do not depend on their presence.
    """
    generator = torch.Generator().manual_seed(seed)
    quiet = 1 / math.sqrt(2 * config.text.num_layers)

    def normal(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    weights = {}
    for name, shape, *_ in specs(config):
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = torch.full(shape, 1.3 * shape[0] ** 0.25)
        elif name.endswith(("norm.weight", "global_scale")):
            value = torch.ones(shape)
        elif name.endswith("gate.bias"):
            value = torch.zeros(shape)
        elif name.endswith("sconv.weight"):
            value = normal(shape, 0.1)
        elif name.endswith("embed.weight") and "unembed" not in name:
            value = normal(shape, 0.3)
        elif name.endswith("unembed.weight"):
            value = normal(shape, 0.02)
        elif name.endswith("rel_logits_proj.proj"):
            value = normal(shape, 0.2)
        elif name.endswith("audio.encoder.weight"):
            value = normal(shape, 0.1)
        elif name.endswith(("wo_ud.weight", "w2_md.weight", "w2_weight")):
            value = normal(shape, quiet / math.sqrt(shape[-1]))
        else:
            value = normal(shape, 1 / math.sqrt(shape[-1]))
        weights[name] = value
    return weights


def is_fp32(name: str) -> bool:
    """Whether a tensor is stored in fp32 in every checkpoint: the gate's bias and scale."""
    return name.endswith(("gate.bias", "gate.global_scale"))


def as_stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in the precision of the checkpoint, on the CPU."""
    return {
        name: x.detach().to("cpu", torch.float32 if is_fp32(name) else torch.bfloat16).contiguous()
        for name, x in weights.items()
    }


def write(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write the checkpoint in the original naming, MTP in a file of its own."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    raw = raw_config(has_towers(weights))
    stored = as_stored(weights)
    for file, is_draft in (("model.safetensors", False), ("mtp.safetensors", True)):
        part = {n: x for n, x in stored.items() if n.startswith("model.mtp.") == is_draft}
        save_file(part, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    pad = tokenizer.special_ids()["<|endoftext|>"]
    generation = {"eos_token_id": raw["eos_token_id"], "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if has_towers(weights):
        (folder / "processor_config.json").write_text(json.dumps(processor(), indent=2) + "\n")
    tokenizer.write(folder, MAX_LENGTH)


def read(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint that `write` made, in float32."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in ("model.safetensors", "mtp.safetensors"):
        found |= load_file(folder / file)
    return {name: x.float() for name, x in found.items()}


def config(towers: bool = False) -> InklingConfig:
    """The parsed config."""
    return parse(raw_config(towers))


def write_single(path: Path, stored: dict[str, Tensor]) -> None:
    """All tensors in one file, replaced at once."""
    from safetensors.torch import save_file

    scratch = path.with_suffix(".partial")
    save_file(stored, scratch, metadata={"format": "pt"})
    scratch.replace(path)


def read_single(path: Path) -> dict[str, Tensor]:
    """What `write_single` wrote, in float32."""
    from safetensors.torch import load_file

    return {name: x.float() for name, x in load_file(path).items()}
