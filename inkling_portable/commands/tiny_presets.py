"""The geometries that `inkling-portable tiny` writes, as config.json dictionaries.

All are in the original dialect. `text` and `omni` are as small as a model can be that still has
every part; `small-like` and `large-like` keep the ratios of the published configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inkling_portable.commands.released_configs import ALIKE

PRESETS = ("text", "omni", "small-like", "large-like")

SPECIAL_TOKENS = {
    "<|endoftext|>": 0,
    "<|message_user|>": 1,
    "<|message_model|>": 2,
    "<|message_system|>": 3,
    "<|message_tool|>": 4,
    "<|content_text|>": 5,
    "<|content_image|>": 6,
    "<|content_model_end_sampling|>": 7,
    "<|content_thinking|>": 9,
    "<|end_message|>": 11,
    "<|content_audio_input|>": 21,
    "<|content_tool_error|>": 23,
    "<|unused_200024|>": 25,  # the released tokenizer's spelling of content_xml
    "<|audio_end|>": 44,
    "<|content_invoke_tool_json|>": 50,
    "<|unused_200053|>": 54,  # audio slot
    "<|unused_200054|>": 55,  # image slot
    "<|content_invoke_tool_text|>": 58,
}
"""Special tokens and their places in the block that ends the vocabulary.

The released tokenizer's block begins at id 199,999, so a vocabulary of 200,058 gives the released
ids. Places between are `<|unused_N|>` with N counted from there, so every valid id has a token.
"""

RELEASED_BLOCK_START = 199_999
SPECIAL_BLOCK = 59
SMALLEST_VOCABULARY = 256 + SPECIAL_BLOCK
MOST_DEPTHS = 8  # as many MTP depths as the released models have
LARGEST_VOCABULARY = RELEASED_BLOCK_START + SPECIAL_BLOCK

PAD_MULTIPLE = 64
VISION = {"patch_size": 16, "temporal_patch_size": 2, "n_channels": 3, "n_layers": 4}
AUDIO = {"n_mel_bins": 80, "mel_vocab_size": 16, "dmel_min_value": -7.0, "dmel_max_value": 2.0}


@dataclass(frozen=True)
class Preset:
    """What differs between presets; `text` holds original-dialect text_config fields."""

    vocab: int
    dtype: str
    layers: int
    period: int
    """Of each `period` layers one is global, at index `global_at`."""
    global_at: int
    towers: bool
    mtp_depths: int
    mtp_local: tuple[int, ...]
    text: Mapping[str, Any] = field(default_factory=dict)


_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
    "d_rel": 8,
    "rel_extent": 32,
    "sliding_window_size": 16,
    "dense_mlp_idx": 1,
    "dense_intermediate_size": 192,
    "intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "route_scale": 2.5,
    "logits_mup_width_multiplier": 3.0,
    "log_scaling_n_floor": 24,
    "model_max_length": 65536,
}

# Kept from the published configs: five local layers to one global, two dense layers, kv heads,
# window to extent, dense width four times and expert width half the hidden size, top-6 with two
# sinks, route scale, mup divisor, eight depths. Query heads are halved, and the log floor is low
# enough to be reached by a short prompt.
_LIKE: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 16,
    "swa_head_dim": 16,
    "d_rel": 8,
    "rel_extent": 64,
    "sliding_window_size": 32,
    "dense_mlp_idx": 2,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "route_scale": 8.0,
    "log_scaling_n_floor": 48,
    "model_max_length": 65536,
}
_SMALL: dict[str, Any] = _LIKE | {
    "hidden_size": 256,
    "num_attention_heads": 16,
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 8,
    "dense_intermediate_size": 1024,
    "intermediate_size": 128,
    "logits_mup_width_multiplier": 16.0,
}
_LARGE: dict[str, Any] = _LIKE | {
    "hidden_size": 384,
    "num_attention_heads": 32,
    "swa_num_attention_heads": 32,
    "swa_num_key_value_heads": 16,
    "dense_intermediate_size": 1536,
    "intermediate_size": 192,
    "logits_mup_width_multiplier": 24.0,
}
_PUBLISHED_DEPTHS = (0, 2, 4, 5, 6, 7)

_TABLE = {
    "text": Preset(500, "float32", 4, 4, 2, False, 2, (0,), _TEXT),
    "omni": Preset(500, "float32", 4, 4, 2, True, 2, (0,), _TEXT),
    "small-like": Preset(1000, "bfloat16", 12, 6, 5, True, 8, _PUBLISHED_DEPTHS, _SMALL),
    "large-like": Preset(1000, "bfloat16", 12, 6, 5, True, 8, _PUBLISHED_DEPTHS, _LARGE),
}


def preset(name: str) -> Preset:
    """The preset called `name`; raises ValueError with the known names."""
    if name not in _TABLE:
        raise ValueError(f"no preset is called {name!r}; use one of {', '.join(PRESETS)}")
    return _TABLE[name]


def config(
    base: Preset,
    *,
    vocab: int,
    layers: int,
    dtype: str,
    towers: bool,
    mtp_depths: int,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """config.json for `base` with the given sizes and text_config `overrides`.

    With towers this is the released nesting; without, a bare text config, whose entry class needs
    no processor. `vocab` counts valid ids; stored rows are padded beyond it, always by some.
    """
    text: dict[str, Any] = {
        "model_type": "inkling_model",
        "num_hidden_layers": layers,
        "local_layer_ids": [i for i in range(layers) if i % base.period != base.global_at],
        "n_shared_experts": 2,
        "shared_expert_sink": True,
        **ALIKE,
        "vocab_size": (vocab // PAD_MULTIPLE + 1) * PAD_MULTIPLE,
        "unpadded_vocab_size": vocab,
        "final_logit_softcapping": None,
        "log_scaling_alpha": 0.1,
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        **base.text,
        "dense_mlp_idx": min(base.text["dense_mlp_idx"], layers),
    }
    for name in overrides:
        if name not in text:
            raise ValueError(f"text_config has no field {name!r}; use one of {', '.join(text)}")
    text.update(overrides)
    # transformers before 5.24 takes the expert width from this name only.
    text["moe_intermediate_size"] = text["intermediate_size"]
    # The special tokens end the valid ids, of which an override may have changed the number.
    start = text["unpadded_vocab_size"] - SPECIAL_BLOCK
    place = {token: start + offset for token, offset in SPECIAL_TOKENS.items()}
    top: dict[str, Any] = {
        "eos_token_id": place["<|content_model_end_sampling|>"],
        "torch_dtype": dtype,
    }
    if mtp_depths:
        top["mtp_config"] = {
            "num_nextn_predict_layers": mtp_depths,
            "chain_hidden_post_norm": False,
            "local_layer_ids": [i for i in base.mtp_local if i < mtp_depths],
        }
    if not towers:
        return {"architectures": ["InklingForCausalLM"], **text, **top}
    width = text["hidden_size"]
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "tie_word_embeddings": False,
        **top,
        "image_token_id": place["<|unused_200054|>"],
        "audio_token_id": place["<|unused_200053|>"],
        "image_bos_token_id": place["<|content_image|>"],
        "audio_bos_token_id": place["<|content_audio_input|>"],
        "text_config": text,
        "vision_config": {
            "model_type": "inkling_vision_model",
            "vision_encoder_type": "hmlp",
            "decoder_dmodel": width,
            "use_vision_norm": True,
            **VISION,
        },
        "audio_config": {
            "model_type": "inkling_audio_model",
            "audio_mode": "dmel",
            "decoder_dmodel": width,
            "use_audio_norm": True,
            "bias": False,
            **AUDIO,
        },
    }


def processor_config() -> dict[str, Any]:
    """processor_config.json for the towers above, as transformers' processor reads it."""
    return {
        "processor_class": "InklingProcessor",
        "image_token": "<|unused_200054|>",
        "audio_token": "<|unused_200053|>",
        "image_bos_token": "<|content_image|>",
        "audio_bos_token": "<|content_audio_input|>",
        "num_dmel_bins": AUDIO["mel_vocab_size"],
        "dmel_min_value": AUDIO["dmel_min_value"],
        "dmel_max_value": AUDIO["dmel_max_value"],
        "image_processor": {
            "image_processor_type": "InklingImageProcessor",
            "size": {"height": VISION["patch_size"], "width": VISION["patch_size"]},
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "do_convert_rgb": True,
            "do_rescale": True,
            "do_normalize": True,
            "rescale_factor": 1 / 255,
            "rescale_image_frac": 2.0,
            "rescale_image_max_upscaled_long_edge": 2048,
        },
        "feature_extractor": {
            "feature_extractor_type": "InklingFeatureExtractor",
            "feature_size": AUDIO["n_mel_bins"],
            "sampling_rate": 16000,
            "audio_token_duration_s": 0.05,
            "window_size_multiplier": 2.0,
            "n_fft": 1600,
            "padding_value": 0.0,
        },
    }
