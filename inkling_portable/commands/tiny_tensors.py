"""Names, shapes and random values of a checkpoint in the original naming.

Every tensor is drawn from a stream of its own, seeded by the seed and the tensor's name, so a
value does not depend on which other tensors are written. Scales are chosen so that activations
stay near one, and no value is neutral: convolutions, gate biases and global scales differ from
zero and one, norm weights differ between channels, and padding rows of the unembedding are large,
so that a reader who forgets any of them gets visibly different logits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from inkling_portable.model.config import AttentionGeometry, InklingConfig

if TYPE_CHECKING:
    import torch


class TensorSpec(NamedTuple):
    """One stored tensor: normal with deviation `scale`, or uniform in `scale` times 0.6 to 1.4."""

    name: str
    shape: tuple[int, ...]
    scale: float
    positive: bool = False
    """Uniform around `scale` instead of normal around 0."""
    fp32: bool = False
    """Stored in fp32 whatever the checkpoint's dtype."""


def tensor_specs(config: InklingConfig) -> Iterator[TensorSpec]:
    """All tensors but those of MTP, in file order."""
    text = config.text
    hidden = text.hidden_size
    # Logits are divided by the mup divisor after this product; 1.5 gives a lively softmax.
    unembed_scale = 1.5 * text.logit_divisor / math.sqrt(hidden)
    yield TensorSpec("model.llm.embed.weight", (text.padded_vocab_size, hidden), 1.0)
    yield _norm("model.llm.embed_norm.weight", hidden)
    for layer in range(text.num_layers):
        yield from _block(
            f"model.llm.layers.{layer}",
            config,
            text.attention(layer),
            dense=text.layer_is_dense(layer),
        )
    yield _norm("model.llm.norm.weight", hidden)
    yield TensorSpec("model.llm.unembed.weight", (text.padded_vocab_size, hidden), unembed_scale)
    if config.vision is not None:
        stages = config.vision.stages()
        for index, stage in enumerate(stages):
            yield _linear(
                f"model.visual.layers.linear_{index}.weight", stage.out_features, stage.in_features
            )
            if index < len(stages) - 1:
                yield _norm(f"model.visual.layers.norm_{index}.weight", stage.out_features)
        yield _norm("model.visual.final_norm.weight", config.vision.out_width)
    if config.audio is not None:
        rows = config.audio.mel_bins * config.audio.mel_levels
        # The tower sums one row per bin.
        scale = 1 / math.sqrt(config.audio.mel_bins)
        yield TensorSpec("model.audio.encoder.weight", (rows, hidden), scale)
        yield _norm("model.audio.final_norm.weight", hidden)


def mtp_specs(config: InklingConfig) -> Iterator[TensorSpec]:
    """The tensors of every MTP depth; none without MTP."""
    if config.mtp is None:
        return
    hidden = config.text.hidden_size
    for depth in range(config.mtp.num_depths):
        prefix = f"model.mtp.layers.{depth}"
        yield _norm(f"{prefix}.hidden_norm.weight", hidden)
        yield _norm(f"{prefix}.embed_norm.weight", hidden)
        yield _linear(f"{prefix}.input_proj.weight", hidden, 2 * hidden)
        yield from _block(
            f"{prefix}.transformer_block", config, config.mtp_attention(depth), dense=True
        )
    if config.mtp.chain_norm:
        yield _norm("model.mtp.chain_norm.weight", hidden)


def _block(
    prefix: str, config: InklingConfig, sizes: AttentionGeometry, *, dense: bool
) -> Iterator[TensorSpec]:
    text = config.text
    hidden, taps = text.hidden_size, text.conv_taps
    yield _norm(f"{prefix}.attn_norm.weight", hidden)
    yield _norm(f"{prefix}.mlp_norm.weight", hidden)
    attn = f"{prefix}.attn"
    yield _linear(f"{attn}.wq_du.weight", sizes.q_size, hidden)
    yield _linear(f"{attn}.wk_dv.weight", sizes.kv_size, hidden)
    yield _linear(f"{attn}.wv_dv.weight", sizes.kv_size, hidden)
    yield _linear(f"{attn}.wr_du.weight", sizes.rel_size, hidden)
    yield _linear(f"{attn}.wo_ud.weight", hidden, sizes.q_size)
    # Scores are scaled by 1/D; norm weights near D ** 0.25 give scores of deviation near 1.
    for name in ("q_norm", "k_norm"):
        yield TensorSpec(
            f"{attn}.{name}.weight", (sizes.head_dim,), sizes.head_dim**0.25, positive=True
        )
    for name in ("k_sconv", "v_sconv"):
        yield TensorSpec(f"{attn}.{name}.weight", (sizes.kv_size, 1, taps), 0.3)
    yield TensorSpec(
        f"{attn}.rel_logits_proj.proj", (sizes.rel_dim, sizes.extent), 1 / math.sqrt(sizes.rel_dim)
    )
    for name in ("attn_sconv", "mlp_sconv"):
        yield TensorSpec(f"{prefix}.{name}.weight", (hidden, 1, taps), 0.3)
    mlp = f"{prefix}.mlp"
    if dense:
        yield _linear(f"{mlp}.w13_dn.weight", 2 * text.dense_width, hidden)
        yield _linear(f"{mlp}.w2_md.weight", hidden, text.dense_width, gain=2.0)
        yield TensorSpec(f"{mlp}.global_scale", (1,), _scale_away_from_one(mlp), positive=True)
        return
    experts, sinks, width = text.num_experts, text.num_sinks, text.expert_width
    # The weights of one token sum to route_scale, so the outputs are drawn that much smaller.
    down = 2.0 / (text.route_scale * math.sqrt(width))
    up = 1 / math.sqrt(hidden)
    yield TensorSpec(f"{mlp}.experts.w13_weight", (experts, 2 * width, hidden), up)
    yield TensorSpec(f"{mlp}.experts.w2_weight", (experts, hidden, width), down * 2)
    yield _linear(f"{mlp}.gate.weight", experts + sinks, hidden, gain=1.5)
    yield TensorSpec(f"{mlp}.gate.bias", (experts,), 0.25, fp32=True)
    yield TensorSpec(
        f"{mlp}.gate.global_scale", (1,), _scale_away_from_one(mlp), positive=True, fp32=True
    )
    shared = f"{mlp}.shared_experts.shared"
    yield TensorSpec(f"{shared}_w13_weight", (sinks, 2 * width, hidden), up)
    yield TensorSpec(f"{shared}_w2_weight", (sinks, hidden, width), down)


def draw(spec: TensorSpec, seed: int, dtype: torch.dtype, valid_rows: int) -> torch.Tensor:
    """The values of `spec` on the CPU, a function of `seed` and the tensor's name.

    Rows of the unembedding from `valid_rows` on are padding and come four times as large.
    """
    import torch

    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if spec.positive:
        values = torch.rand(spec.shape, generator=generator).mul_(0.8).add_(0.6).mul_(spec.scale)
    else:
        values = torch.randn(spec.shape, generator=generator).mul_(spec.scale)
    if spec.name.endswith("unembed.weight"):
        values[valid_rows:] *= 4
    return values if spec.fp32 else values.to(dtype)


def _norm(name: str, width: int) -> TensorSpec:
    return TensorSpec(name, (width,), 1.0, positive=True)


def _linear(name: str, rows: int, columns: int, gain: float = 1.0) -> TensorSpec:
    return TensorSpec(name, (rows, columns), gain / math.sqrt(columns))


def _scale_away_from_one(name: str) -> float:
    """A centre whose 0.6 to 1.4 range holds no value near 1, above or below by the name."""
    return 0.6 if hashlib.sha256(name.encode()).digest()[0] % 2 else 1.8
