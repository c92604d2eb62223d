"""Tiny checkpoints in the quantised forms of the released ones.

As there, the routed experts are quantised but for those of the first sparse layer, MTP stays plain
and is in no list of exceptions, ModelOpt's list stands in a file of its own, compressed-tensors
releases have linear layers of the attention in FP8, and Quark's have an adapter's tensors mixed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from inkling_portable.commands.tiny_tensors import TensorSpec, draw
from inkling_portable.model import quant_layouts as quant
from inkling_portable.model.config import InklingConfig
from inkling_portable.model.quant_layouts import Layout, Part

if TYPE_CHECKING:
    import torch

WEIGHTS = ("nvfp4", "mxfp4", "fp8")
LAYOUTS = tuple(dict.fromkeys(form.name for form in quant.LAYOUTS.values()))
LINEARS = {"nvfp4/compressed-tensors": "block", "fp8/compressed-tensors": "channel"}
"""How linear layers of the attention are stored in FP8, by layout."""

ADAPTER = {
    "language_model.layers.0.attn.wq_du.lora_A.weight": "U8",
    "language_model.layers.0.attn.wq_du.lora_B.weight_scale": "U8",
    "language_model.lm_head.lora_B.weight": "BF16",
}
"""Tensors of an adapter as the released MXFP4 files have them, with their types."""


def quantised_names(config: InklingConfig, form: Layout) -> list[str]:
    """Weights that a release in this layout stores quantised, in file order."""
    text = config.text
    sparse = [layer for layer in range(text.num_layers) if not text.layer_is_dense(layer)]
    found = []
    for layer in range(text.num_layers):
        where = f"model.llm.layers.{layer}."
        if form.key in LINEARS:
            found += [where + name for name in quant.LINEARS]
        if layer in sparse[1:]:
            found += [f"{where}mlp.experts.{name}" for name in quant.EXPERT_WEIGHTS]
    return found


def stored_as(form: Layout, name: str, shape: tuple[int, ...]) -> dict[str, Part]:
    """The tensors that stand for the quantised weight `name`, by role."""
    if name.endswith(quant.EXPERT_WEIGHTS):
        return quant.parts(form, name, shape)
    rows, columns = shape
    tiles = (-(-rows // quant.TILE[0]), -(-columns // quant.TILE[1]))
    scale = tiles if LINEARS[form.key] == "block" else (rows, 1)
    return {
        quant.CODES: Part(name, "F8_E4M3", (rows, columns)),
        quant.SCALE: Part(quant.linear_scale(name), "F32", scale),
    }


def quantise(
    form: Layout, name: str, weight: torch.Tensor, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of every tensor that stands for the weight `name`."""
    import torch

    parts = stored_as(form, name, tuple(weight.shape))
    if name.endswith(quant.EXPERT_WEIGHTS):
        values = quant.encode(form, weight)
    else:
        values = quant.encode_linear(weight, tiles=LINEARS[form.key] == "block")
    for role, part in parts.items():
        if role == quant.ORIGINAL:
            yield part.name, torch.tensor(weight.shape)
        elif role == quant.INPUT:
            spec = TensorSpec(part.name, part.shape, 3.0, positive=True, fp32=part.dtype == "F32")
            yield part.name, draw(spec, seed, torch.bfloat16, 0)
        else:
            yield part.name, values[role]


def adapter(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Random tensors under the names in ADAPTER."""
    import torch

    for name, kind in ADAPTER.items():
        values = draw(TensorSpec(name, (4, 8), 1.0), seed, torch.bfloat16, 0)
        yield name, values.view(torch.uint8).clone() if kind == "U8" else values


def blocks(form: Layout, plain: list[str], quantised: list[str]) -> tuple[dict[str, Any], str]:
    """What to write about the quantisation, and where: "config.json" or a file of its own."""
    block = quant.config_block(form, plain, quantised, LINEARS.get(form.key))
    if form.name != "modelopt":
        return block, "config.json"
    del block["quant_method"]
    return {"quantization": block}, "hf_quant_config.json"
