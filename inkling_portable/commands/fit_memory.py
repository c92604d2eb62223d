"""Bytes of a checkpoint and of one GPU: weights from names and shapes, the rest from estimates.

Weights are exact: what is replicated, split over tensor-parallel ranks and quantised is decided by
a tensor's name. Activations, CUDA graphs and the driver's share can only be estimated here; vLLM
measures them when it starts. Each estimate says what it counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from inkling_portable.commands.tiny_tensors import TensorSpec, mtp_specs, tensor_specs
from inkling_portable.model.config import InklingConfig

GIB = 1 << 30
BF16, FP32 = 2, 4
UNQUANTISED_SPARSE_LAYERS = 1
"""The first sparse layer keeps its experts in bfloat16 in every quantised release."""


class Piece(NamedTuple):
    """Part of a stored tensor: its bytes, and whether tensor-parallel ranks divide them."""

    size: int
    split: bool


REPLICATED = (".embed.weight", "norm.weight", "rel_logits_proj.proj", "global_scale", "gate.weight",
              "gate.bias", "input_proj.weight")  # fmt: skip
TOWERS = ("model.visual.", "model.audio.")


def is_replicated(name: str) -> bool:
    """Whether every rank holds the whole tensor."""
    return name.startswith(TOWERS) or name.endswith(REPLICATED)


def part_of(name: str) -> str:
    """The line of the table under which a tensor is counted."""
    if name.startswith(TOWERS):
        return "towers"
    if name.startswith("model.mtp."):
        return "draft depths"
    for mark, part in (
        (".mlp.experts.", "routed experts"),
        (".shared_experts.", "shared experts"),
        (".mlp.w", "dense MLP"),
        (".attn.", "attention"),
        (".unembed.", "unembedding"),
        (".embed.", "embedding (on every GPU)"),
    ):
        if mark in name:
            return part
    return "convolutions, gates, norms"


def pieces(spec: TensorSpec, weights: str, quantised: bool) -> Iterator[Piece]:
    """What is stored for one tensor of the plain checkpoint; scales follow their weight.

    weights: "bf16", "nvfp4" (ModelOpt layout), "mxfp4" (Quark) or "fp8" (a scale for each output
    channel). quantised: whether this tensor is stored in that format.
    """
    count = math.prod(spec.shape)
    if not quantised:
        width = FP32 if spec.fp32 else BF16
        yield Piece(count * width, not is_replicated(spec.name))
        return
    experts, rows, _ = spec.shape
    if weights == "fp8":
        yield Piece(count, True)
        # Output channels of the second product are whole on every rank.
        yield Piece(experts * rows * FP32, spec.name.endswith("w13_weight"))
        return
    yield Piece(count // 2, True)
    yield Piece(count // {"nvfp4": 16, "mxfp4": 32}[weights], True)
    if weights == "nvfp4":
        # A global scale for each expert, the activation's largest value, the original shape.
        yield Piece(experts * FP32 + BF16 + len(spec.shape) * 8, False)


def quantised_names(config: InklingConfig, weights: str) -> frozenset[str]:
    """Names of the tensors that a release in this format stores quantised."""
    if weights == "bf16":
        return frozenset()
    sparse = [i for i in range(config.text.num_layers) if not config.text.layer_is_dense(i)]
    return frozenset(
        f"model.llm.layers.{layer}.mlp.experts.{name}_weight"
        for layer in sparse[UNQUANTISED_SPARSE_LAYERS:]
        for name in ("w13", "w2")
    )


def checkpoint_bytes(config: InklingConfig, weights: str, *, mtp: bool = True) -> int:
    """Bytes of all stored tensors."""
    quantised = quantised_names(config, weights)
    specs = [*tensor_specs(config), *(mtp_specs(config) if mtp else ())]
    return sum(p.size for s in specs for p in pieces(s, weights, s.name in quantised))


def weights_per_gpu(
    config: InklingConfig, weights: str, tp: int, mtp: int, expert_padding: int = 1
) -> dict[str, int]:
    """Bytes of each part on one GPU, in file order.

    mtp: draft depths that are loaded; expert_padding: multiple to which the kernels round the
    expert width of one GPU up.
    """
    text = config.text
    quantised = quantised_names(config, weights)
    width = text.expert_width // tp
    padded = -(-width // expert_padding) * expert_padding
    drafts = [
        spec
        for spec in mtp_specs(config)
        if not spec.name.startswith("model.mtp.layers.") or int(spec.name.split(".")[3]) < mtp
    ]
    found: dict[str, int] = {}
    for spec in [*tensor_specs(config), *(drafts if mtp else ())]:
        for piece in pieces(spec, weights, spec.name in quantised):
            size = piece.size // tp if piece.split else piece.size
            if piece.split and spec.name in quantised:
                size = size // width * padded
            part = part_of(spec.name)
            found[part] = found.get(part, 0) + size
    return found


# --- estimates ------------------------------------------------------------------------------------

CONTEXT_BYTES = 2 * GIB
"""Driver context, communication buffers, workspaces and fragmentation, by rule of thumb."""
LOGIT_COPIES = 3
"""Float32 logits, and two more of their size while sampling."""
GRAPH_BYTES_PER_LAYER = 1 << 18
"""What a driver keeps for the launches of one layer in one captured graph, by rule of thumb."""
MOST_CAPTURED = 512


@dataclass(frozen=True)
class Load:
    """The widest step: batch_tokens rows, of which `requests` are sampled, each with its drafts."""

    batch_tokens: int
    requests: int
    mtp: int = 0

    @property
    def sampled(self) -> int:
        return min(self.batch_tokens, self.requests * (1 + self.mtp))


def row_bytes(config: InklingConfig, tp: int) -> int:
    """Live bytes of one token row at the widest point of a layer: residual, norm and one branch."""
    text = config.text
    hidden = text.hidden_size
    widest = 0
    for local in (False, True):
        sizes = text.geometry(local)
        projected = sum(sizes.qkvr_sizes) + 2 * sizes.q_size + sizes.heads * sizes.extent
        widest = max(widest, projected // tp)
    expert = text.expert_width // tp
    # The engine's experts keep both products of every chosen expert.
    experts = text.top_k * (max(2 * expert, hidden) + expert) + 2 * hidden
    dense = 3 * text.dense_width // tp + hidden
    return BF16 * (4 * hidden + max(widest, experts, dense))


def activation_bytes(config: InklingConfig, tp: int, load: Load) -> int:
    """The larger of a layer at full batch, the logits of all sampled rows, and the image tower."""
    layer = load.batch_tokens * row_bytes(config, tp)
    logits = load.sampled * config.text.vocab_size * FP32 * LOGIT_COPIES
    tower = 0
    if config.vision is not None:
        vision = config.vision
        pixels = vision.patch_size**2 * vision.temporal_patch_size * vision.channels
        # Pixels in float32, and the two sides of the first stage in bfloat16.
        tower = load.batch_tokens * pixels * (FP32 + 2 * BF16)
    return max(layer, logits, tower)


def captured_sizes(load: Load) -> list[int]:
    """Row counts for which vLLM captures a graph by default."""
    most = min(MOST_CAPTURED, 2 * load.requests * (1 + load.mtp))
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)]
    return [size for size in sizes if size <= most]


def graph_bytes(config: InklingConfig, tp: int, load: Load) -> int:
    """The pool that graphs share, as large as the widest captured step, and their launches."""
    sizes = captured_sizes(load)
    launches = len(sizes) * (config.text.num_layers + load.mtp) * GRAPH_BYTES_PER_LAYER
    return max(sizes) * row_bytes(config, tp) + launches
