"""The published configs as dictionaries, field by field from the released config.json files.

Both carry `moe_intermediate_size` beside the original dialect's widths, because transformers before
5.24 reads the expert width from nowhere else.
"""

from __future__ import annotations

import copy
from typing import Any

ALIKE: dict[str, Any] = {
    "use_gate_bias": True,
    "use_global_scale": True,
    "norm_after_topk": True,
    "gate_activation": "sigmoid",
    "inference_moe_w13_interleaved": True,
    "use_embed_norm": True,
    "use_sconv": True,
    "sconv_kernel_size": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "q_bias": False,
    "o_bias": False,
}
"""What no Inkling has otherwise."""

_TEXT: dict[str, Any] = {
    "model_type": "inkling_model",
    "head_dim": 128,
    "swa_head_dim": 128,
    "num_key_value_heads": 8,
    "d_rel": 16,
    "rel_extent": 1024,
    "sliding_window_size": 512,
    "dense_mlp_idx": 2,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "shared_expert_sink": True,
    "route_scale": 8.0,
    **ALIKE,
    "vocab_size": 201024,
    "unpadded_vocab_size": 200058,
    "final_logit_softcapping": None,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
    "model_max_length": 1048576,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def _nested(text: dict[str, Any]) -> dict[str, Any]:
    layers = text["num_hidden_layers"]
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "eos_token_id": 200006,
        "text_config": {
            **_TEXT,
            **text,
            "local_layer_ids": [i for i in range(layers) if i % 6 != 5],
            "moe_intermediate_size": text["intermediate_size"],
        },
        "vision_config": {
            "vision_encoder_type": "hmlp",
            "decoder_dmodel": text["hidden_size"],
            "patch_size": 40,
            "temporal_patch_size": 2,
            "n_channels": 3,
            "n_layers": 4,
            "use_vision_norm": True,
        },
        "audio_config": {
            "decoder_dmodel": text["hidden_size"],
            "n_mel_bins": 80,
            "mel_vocab_size": 16,
            "bias": False,
            "dmel_min_value": -7.0,
            "dmel_max_value": 2.0,
            "use_audio_norm": True,
            "audio_mode": "dmel",
        },
        "mtp_config": {
            "num_nextn_predict_layers": 8,
            "chain_hidden_post_norm": False,
            "local_layer_ids": [0, 2, 4, 5, 6, 7],
        },
    }


_RELEASED = {
    "Inkling": _nested(
        {
            "hidden_size": 6144,
            "num_hidden_layers": 66,
            "num_attention_heads": 64,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 16,
            "dense_intermediate_size": 24576,
            "intermediate_size": 3072,
            "logits_mup_width_multiplier": 24.0,
        }
    ),
    "Inkling-Small": _nested(
        {
            "hidden_size": 4096,
            "num_hidden_layers": 42,
            "num_attention_heads": 32,
            "swa_num_attention_heads": 32,
            "swa_num_key_value_heads": 8,
            "dense_intermediate_size": 16384,
            "intermediate_size": 2048,
            "logits_mup_width_multiplier": 16.0,
        }
    ),
}


def released(name: str) -> dict[str, Any]:
    """A fresh copy of the config of "Inkling" or "Inkling-Small"."""
    return copy.deepcopy(_RELEASED[name])
