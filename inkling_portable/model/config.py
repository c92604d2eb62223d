"""What an Inkling checkpoint's config.json means: both dialects read into one plain description.

Pure Python, so that any command can read a config without torch or vLLM. The original dialect and
the Hugging Face one spell several fields differently and give `intermediate_size` two meanings;
`parse` is the only place that knows. Nothing that changes the arithmetic is guessed: a value that
no implementation supports, or a width that two fields give differently, is a `ConfigError`.

Pass the dictionary of config.json itself. Config classes of other libraries fill in defaults of
their own (no local layers, no embedding norm) that are wrong for this family and that can no
longer be told from what the file said.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from inkling_portable.model.config_block import Block, ConfigError
from inkling_portable.model.vision_plan import Stage, plan_stages

__all__ = [
    "AttentionGeometry",
    "AudioConfig",
    "ConfigError",
    "InklingConfig",
    "MtpConfig",
    "TextConfig",
    "VisionConfig",
    "parse",
]

log = logging.getLogger(__name__)

LEAKED_EXPERT_WIDTH = 3072
"""`moe_intermediate_size` default of a transformers class; it leaks into files that do not mean it
(transformers issue 49416), so beside the original dialect's fields it says nothing."""

CLASS_DEFAULT_SLOTS = {
    "image_token_id": 200054,
    "audio_token_id": 200053,
    "image_bos_token_id": 200005,
    "audio_bos_token_id": 200020,
}
"""What transformers writes when the checkpoint says nothing; beyond the vocabulary it is noise."""

GLOBAL_EVERY = 6
"""Without any statement about local layers, each sixth layer is global: 5, 11, 17 and so on."""

MODEL_TYPES = frozenset({"inkling_mm_model", "inkling_model", "inkling_text", "inkling_mtp"})
LAYER_KINDS = {"hybrid_sliding": True, "hybrid": False}
MLP_KINDS = {"dense": True, "sparse": False}
ONLY = "no implementation of Inkling supports anything else"


@dataclass(frozen=True)
class AttentionGeometry:
    """Sizes of one attention layer before any split over ranks."""

    heads: int
    kv_heads: int
    head_dim: int
    rel_dim: int
    window: int
    """Visible keys including the query's own, 0 = every earlier key."""
    extent: int
    """Number of backward distances that have a learned bias; farther ones have bias 0."""

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def rel_size(self) -> int:
        return self.heads * self.rel_dim

    @property
    def qkvr_sizes(self) -> tuple[int, int, int, int]:
        """Rows of the fused projection: q, k, v, r."""
        return self.q_size, self.kv_size, self.kv_size, self.rel_size

    def copies(self, ranks: int) -> int:
        """Ranks that hold the same KV heads: with more ranks than heads each head is replicated."""
        return max(1, ranks // self.kv_heads)

    def rank_kv_heads(self, ranks: int) -> int:
        """KV heads of one rank."""
        return self.kv_heads * self.copies(ranks) // ranks

    def split_sizes(self, ranks: int) -> tuple[int, int, int, int]:
        """As `qkvr_sizes`, of the projection over all ranks: replicated heads count each time."""
        kv = self.kv_size * self.copies(ranks)
        return self.q_size, kv, kv, self.rel_size

    @property
    def scale(self) -> float:
        """Factor on q.k: one over the head dimension, not over its root."""
        return 1.0 / self.head_dim


@dataclass(frozen=True)
class TextConfig:
    """The decoder. Widths in elements, positions in tokens."""

    hidden_size: int
    num_layers: int
    global_heads: int
    global_kv_heads: int
    global_head_dim: int
    local_heads: int
    local_kv_heads: int
    local_head_dim: int
    rel_dim: int
    rel_extent: int
    window: int
    local_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]
    dense_width: int
    expert_width: int
    num_experts: int
    """Routed experts; the always active sink experts are counted apart."""
    top_k: int
    num_sinks: int
    route_scale: float
    conv_taps: int
    norm_eps: float
    vocab_size: int
    """Valid token ids; rows beyond it are padding and must never be sampled."""
    padded_vocab_size: int
    """Rows of the embedding, and of the unembedding unless it is stored already cut."""
    logit_divisor: float
    log_floor: int
    """Positions p with p + 1 above it gain log-length scaling on global layers; 0 = never."""
    log_alpha: float
    max_positions: int | None

    def layer_is_local(self, layer: int) -> bool:
        return layer in self.local_layers

    def layer_is_dense(self, layer: int) -> bool:
        return layer in self.dense_layers

    def geometry(self, local: bool, extent: int | None = None) -> AttentionGeometry:
        """Sizes of a local or a global layer; `extent` overrides the number of bias distances."""
        if local:
            return AttentionGeometry(
                self.local_heads, self.local_kv_heads, self.local_head_dim, self.rel_dim,
                self.window, extent or self.window)  # fmt: skip
        return AttentionGeometry(
            self.global_heads, self.global_kv_heads, self.global_head_dim, self.rel_dim,
            0, extent or self.rel_extent)  # fmt: skip

    def attention(self, layer: int) -> AttentionGeometry:
        """Sizes of the attention of trunk layer `layer`."""
        return self.geometry(self.layer_is_local(layer))

    def check_tensor_parallel(self, ranks: int) -> None:
        """Check that every sharded width splits evenly over `ranks`.

        With more ranks than KV heads, as many ranks hold each head; the convolution states of the
        branches are split among all of them, those of keys and values are held with the heads.

        Raises:
            ConfigError: one sentence naming the first width that does not split.
        """
        if ranks < 1:
            raise ConfigError(
                f"tensor parallelism needs at least 1 rank; found {ranks}; pass a positive size"
            )
        widths = {
            "num_attention_heads": self.global_heads,
            "num_key_value_heads": self.global_kv_heads,
            "swa_num_attention_heads": self.local_heads,
            "swa_num_key_value_heads": self.local_kv_heads,
            "hidden_size": self.hidden_size,
            "the dense MLP width": self.dense_width,
            "the expert width": self.expert_width,
        }
        replicated = ("num_key_value_heads", "swa_num_key_value_heads")

        def splits(name: str, n: int) -> bool:
            return widths[name] % n == 0 or (name in replicated and n % widths[name] == 0)

        for name, width in widths.items():
            if not splits(name, ranks):
                most = min(self.global_heads, self.local_heads)
                fits = [n for n in range(1, most + 1) if all(splits(other, n) for other in widths)]
                divide = " or to divide it" if name in replicated else ""
                raise ConfigError(
                    f"tensor parallel size {ranks} needs {name} to be a multiple of it{divide}; "
                    f"found {width}; use one of {', '.join(map(str, fits))}"
                )


@dataclass(frozen=True)
class VisionConfig:
    """The image tower: patches of `temporal x patch x patch x channels` pixels to one row each."""

    out_width: int
    patch_size: int
    temporal_patch_size: int
    channels: int
    num_stages: int
    norm_eps: float

    def stages(self) -> tuple[Stage, ...]:
        """The linear stages in order."""
        return plan_stages(
            self.patch_size, self.temporal_patch_size, self.channels, self.num_stages,
            self.out_width)  # fmt: skip


@dataclass(frozen=True)
class AudioConfig:
    """The audio tower: per frame, the sum of one table row for each mel bin's level."""

    out_width: int
    mel_bins: int
    mel_levels: int
    min_value: float | None
    """Log10 range of the levels; None in the Hugging Face dialect, whose processor has it."""
    max_value: float | None
    norm_eps: float


@dataclass(frozen=True)
class MtpConfig:
    """The multi-token-prediction depths, each one dense decoder block."""

    num_depths: int
    local_depths: tuple[int, ...]
    chain_norm: bool
    """Whether one shared norm follows each depth; released checkpoints say no."""
    local_extent: int

    def depth_is_local(self, depth: int) -> bool:
        return depth in self.local_depths


@dataclass(frozen=True)
class InklingConfig:
    """Everything config.json says that the model needs. Absent parts are None."""

    text: TextConfig
    vision: VisionConfig | None = None
    audio: AudioConfig | None = None
    mtp: MtpConfig | None = None
    eos_ids: tuple[int, ...] = ()
    image_token: int | None = None
    """Slot id that one image row replaces; None = look it up in the tokenizer. So below."""
    audio_token: int | None = None
    image_opener: int | None = None
    audio_opener: int | None = None

    def require_mtp(self) -> MtpConfig:
        """The MTP depths.

        Raises:
            ConfigError: the checkpoint has none.
        """
        if self.mtp is None:
            raise ConfigError(
                "drafting needs MTP depths; the config names none in mtp_config or num_mtp_layers; "
                "serve without a speculative config or use a checkpoint that has them"
            )
        return self.mtp

    def mtp_attention(self, depth: int) -> AttentionGeometry:
        """Sizes of the attention of MTP depth `depth`."""
        mtp = self.require_mtp()
        if mtp.depth_is_local(depth):
            return self.text.geometry(local=True, extent=mtp.local_extent)
        return self.text.geometry(local=False)


def parse(raw: Mapping[str, Any], *, dense_layers: Collection[int] | None = None) -> InklingConfig:
    """Read a config.json dictionary of either dialect, nested or a bare text config.

    Args:
        raw: the dictionary; extra keys are allowed.
        dense_layers: ids of layers that have a dense MLP by the checkpoint's tensors, used only
            when the config says nothing about it.

    Raises:
        ConfigError: one sentence naming the field, what was found and the remedy.
    """
    top = Block(raw, "config.json")
    model_type = top.get("model_type")
    if model_type is not None and model_type not in MODEL_TYPES:
        top.fail("model_type", model_type, f"use one of {', '.join(sorted(MODEL_TYPES))}")
    nested = top.get("text_config") is not None
    if not nested and model_type == "inkling_mm_model":
        top.fail("text_config", None, "add the text block")
    text_block = top.block("text_config") if nested else top
    is_draft = text_block.get("model_type") == "inkling_mtp"
    text = _text(text_block, is_draft, dense_layers)
    top.refuse("tie_word_embeddings", (False,), "store the unembedding as a tensor of its own")
    mtp_home = top if top.get("mtp_config") is not None else text_block
    vision = _vision(top, text) if top.get("vision_config") is not None else None
    audio = _audio(top, text) if top.get("audio_config") is not None else None
    vocab = text.vocab_size
    return InklingConfig(
        text=text,
        vision=vision,
        audio=audio,
        mtp=_mtp(mtp_home, text_block, is_draft, text),
        eos_ids=_eos(top, text),
        image_token=_slot(top, "image_token_id", vision, vocab),
        audio_token=_slot(top, "audio_token_id", audio, vocab),
        image_opener=_slot(top, "image_bos_token_id", vision, vocab),
        audio_opener=_slot(top, "audio_bos_token_id", audio, vocab),
    )


def _text(block: Block, is_draft: bool, dense_layers: Collection[int] | None) -> TextConfig:
    _refuse_unsupported_text(block)
    layers = block.whole("num_hidden_layers")
    hidden = block.whole("hidden_size")
    heads = block.whole("num_attention_heads")
    if block.get("head_dim") is None and hidden % heads:
        block.fail("head_dim", None, f"give it, since {hidden} / {heads} is not whole")
    head_dim = block.whole("head_dim", default=hidden // heads)
    kv_heads = block.whole("num_key_value_heads")
    local_heads = block.whole("swa_num_attention_heads", default=heads)
    local_kv_heads = block.whole("swa_num_key_value_heads", default=kv_heads)
    local_head_dim = block.whole("swa_head_dim", default=head_dim)
    for q_name, q_count, kv_name, kv_count in (
        ("num_attention_heads", heads, "num_key_value_heads", kv_heads),
        ("swa_num_attention_heads", local_heads, "swa_num_key_value_heads", local_kv_heads),
    ):
        if q_count % kv_count:
            block.fail(q_name, q_count, f"make it a multiple of {kv_name}, which is {kv_count}")
    for name, size in (("v_head_dim", head_dim), ("swa_v_head_dim", local_head_dim)):
        block.refuse(name, (size,), "keys and values must have the same width")
    expert_width, dense_width = _widths(block)
    experts = block.whole("n_routed_experts", "num_local_experts")
    top_k = block.whole("num_experts_per_tok")
    if top_k > experts:
        block.fail("num_experts_per_tok", top_k, f"use at most the {experts} routed experts")
    vocab, padded = _vocabulary(block)
    floor = block.optional_whole("log_scaling_n_floor", minimum=1) or 0
    return TextConfig(
        hidden_size=hidden,
        num_layers=layers,
        global_heads=heads,
        global_kv_heads=kv_heads,
        global_head_dim=head_dim,
        local_heads=local_heads,
        local_kv_heads=local_kv_heads,
        local_head_dim=local_head_dim,
        rel_dim=block.whole("d_rel"),
        rel_extent=block.whole("rel_extent"),
        window=block.whole("sliding_window_size", "sliding_window"),
        local_layers=_local_layers(block, layers, is_draft),
        dense_layers=_dense_layers(block, layers, dense_layers),
        dense_width=dense_width,
        expert_width=expert_width,
        num_experts=experts,
        top_k=top_k,
        num_sinks=block.whole("n_shared_experts"),
        route_scale=block.number("route_scale"),
        conv_taps=block.whole("sconv_kernel_size", "conv_kernel_size", default=4),
        norm_eps=block.number("rms_norm_eps"),
        vocab_size=vocab,
        padded_vocab_size=padded,
        logit_divisor=block.number("logits_mup_width_multiplier", "embedding_multiplier"),
        log_floor=floor,
        log_alpha=block.number("log_scaling_alpha") if floor else 0.0,
        max_positions=block.optional_whole("model_max_length", "max_position_embeddings"),
    )


def _refuse_unsupported_text(block: Block) -> None:
    """Refuse settings that some config class declares and that no implementation has."""
    unsupported = "no implementation of Inkling supports anything else"
    for flag in (
        "use_embed_norm", "use_sconv", "use_gate_bias", "use_global_scale", "norm_after_topk",
        "shared_expert_sink", "inference_moe_w13_interleaved", "mtp_hidden_states_first",
    ):  # fmt: skip
        block.refuse(flag, (True,), unsupported)
    for flag in ("q_bias", "o_bias", "attention_bias"):
        block.refuse(flag, (False,), unsupported)
    block.refuse("gate_activation", ("sigmoid",), unsupported)
    block.refuse("hidden_act", ("silu",), unsupported)
    block.refuse("final_logit_softcapping", (), unsupported)
    block.refuse("tie_word_embeddings", (False,), "store the unembedding as a tensor of its own")


def _widths(block: Block) -> tuple[int, int]:
    """Expert and dense width; the presence of `dense_intermediate_size` tells the dialect."""
    first = block.whole("intermediate_size")
    dense = block.optional_whole("dense_intermediate_size")
    expert = block.optional_whole("moe_intermediate_size")
    if dense is not None:
        if expert not in (None, first, LEAKED_EXPERT_WIDTH):
            block.fail(
                "moe_intermediate_size",
                expert,
                f"beside dense_intermediate_size {dense} the expert width is intermediate_size "
                f"{first}, so delete moe_intermediate_size (original dialect) or "
                "dense_intermediate_size (Hugging Face dialect)",
            )
        return first, dense
    if expert is not None:
        return expert, first
    log.warning(
        "%s gives neither dense_intermediate_size nor moe_intermediate_size; "
        "taking intermediate_size %d for dense and expert layers alike",
        block.where,
        first,
    )
    return first, first


def _vocabulary(block: Block) -> tuple[int, int]:
    """Valid ids and stored rows. With `padded_vocab_size` given, `vocab_size` is the true size."""
    vocab = block.whole("vocab_size")
    padded = block.optional_whole("padded_vocab_size") or vocab
    valid = block.optional_whole("unpadded_vocab_size") or vocab
    if vocab > padded:
        block.fail("padded_vocab_size", padded, f"use at least vocab_size, which is {vocab}")
    if valid > padded:
        block.fail("unpadded_vocab_size", valid, f"use at most the {padded} stored rows")
    return min(valid, vocab), padded


def _local_layers(block: Block, layers: int, is_draft: bool) -> tuple[int, ...]:
    # The engine writes the depths' local ids over the trunk's in a draft config.
    ids = None if is_draft else block.optional_ids("local_layer_ids", layers, "layers")
    if ids is not None:
        return ids
    kinds = block.optional_kinds("layer_types", layers, LAYER_KINDS)
    if kinds is not None:
        return kinds
    return tuple(i for i in range(layers) if i % GLOBAL_EVERY != GLOBAL_EVERY - 1)


def _dense_layers(block: Block, layers: int, known: Collection[int] | None) -> tuple[int, ...]:
    count = block.optional_whole("dense_mlp_idx", minimum=0)
    if count is not None:
        if count > layers:
            block.fail("dense_mlp_idx", count, f"it counts layers, of which there are {layers}")
        return tuple(range(count))
    kinds = block.optional_kinds("mlp_layer_types", layers, MLP_KINDS)
    if kinds is not None:
        return kinds
    if known is None:
        block.fail("dense_mlp_idx", None, "give it or mlp_layer_types")
    return tuple(sorted(known))


def _vision(top: Block, text: TextConfig) -> VisionConfig | None:
    block = top.block("vision_config")
    width, is_hf = _tower_width(block, text, vision_encoder_type="hmlp", use_vision_norm=True)
    if width is None:
        return None
    names = ("n_layers", "num_hidden_layers") if is_hf else ("n_layers",)
    channels = ("num_channels", "n_channels") if is_hf else ("n_channels",)
    config = VisionConfig(
        out_width=width,
        patch_size=block.whole("patch_size"),
        temporal_patch_size=block.whole("temporal_patch_size"),
        channels=block.whole(*channels),
        num_stages=block.whole(*names),
        norm_eps=block.number("rms_norm_eps", default=text.norm_eps),
    )
    try:
        config.stages()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return config


def _audio(top: Block, text: TextConfig) -> AudioConfig | None:
    block = top.block("audio_config")
    width, is_hf = _tower_width(block, text, audio_mode="dmel", use_audio_norm=True)
    if width is None:
        return None
    block.refuse("bias", (False,), ONLY)
    low, high = block.optional_number("dmel_min_value"), block.optional_number("dmel_max_value")
    if not is_hf:
        block.require("dmel_min_value")
        block.require("dmel_max_value")
    if low is not None and high is not None and low >= high:
        block.fail("dmel_max_value", high, f"make it larger than dmel_min_value, which is {low}")
    return AudioConfig(
        out_width=width,
        mel_bins=block.whole("n_mel_bins", "num_codebooks"),
        mel_levels=block.whole("mel_vocab_size", "codebook_size"),
        min_value=low,
        max_value=high,
        norm_eps=block.number("rms_norm_eps", default=text.norm_eps),
    )


def _tower_width(block: Block, text: TextConfig, **known: Any) -> tuple[int | None, bool]:
    """Output width (None = tower disabled) and whether the block is in the HF dialect.

    A field in `known` has that value, or is left out, which only HF's dialect may.
    """
    is_hf = block.has("text_hidden_size")
    if block.has("decoder_dmodel") and block.get("decoder_dmodel") is None:
        return None, is_hf
    if not is_hf and not block.has("decoder_dmodel"):
        return None, is_hf
    for name in ("decoder_dmodel", "text_hidden_size"):
        if block.has(name) and block.whole(name) != text.hidden_size:
            block.fail(name, block.get(name), f"it must equal hidden_size, {text.hidden_size}")
    for name, value in known.items():
        if not is_hf:
            block.require(name)
        block.refuse(name, (value,), ONLY)
    return text.hidden_size, is_hf


def _mtp(home: Block, text_block: Block, is_draft: bool, text: TextConfig) -> MtpConfig | None:
    extent = text.window
    if home.get("mtp_config") is not None:
        block, ids_name = home.block("mtp_config"), "local_layer_ids"
        depths = block.whole("num_nextn_predict_layers", minimum=0)
        extent = block.optional_whole("local_extent") or extent
    else:
        block = text_block
        ids_name = "local_layer_ids" if is_draft else "mtp_local_layer_ids"
        depths = (
            block.optional_whole("num_mtp_layers", "num_nextn_predict_layers", minimum=0)
            or 0
        )  # fmt: skip
    if depths < 1:
        return None
    return MtpConfig(
        num_depths=depths,
        local_depths=block.optional_ids(ids_name, depths, "MTP depths") or (),
        chain_norm=block.flag("chain_hidden_post_norm", default=False),
        local_extent=extent,
    )


def _eos(top: Block, text: TextConfig) -> tuple[int, ...]:
    value = top.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < text.vocab_size:
            top.fail("eos_token_id", value, f"use ids from 0 to {text.vocab_size - 1}")
    return tuple(ids)


def _slot(top: Block, name: str, tower: object, vocab: int) -> int | None:
    """A special token's id; without the tower that reads it, it does not matter."""
    value = top.optional_whole(name, minimum=0)
    if tower is None or value is None or value < vocab:
        return value
    if value == CLASS_DEFAULT_SLOTS[name]:
        return None
    return top.fail(name, value, f"use an id below the vocabulary of {vocab}")
