"""Config classes that the engine holds: both dialects in, the engine's attribute names out.

`config.py` decides what a config.json means. These classes write its answer back in the original
dialect, whose names vLLM reads by itself (speculative decoding rewrites them in place and
`--hf-overrides` sets them), and `describe` reads that back into the plain description.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from inkling_portable.model.config import ConfigError, InklingConfig, TextConfig, parse

# Keys of a text block that say nothing about the arithmetic and pass through unchanged.
_PASSED_ON = (
    "architectures", "dtype", "torch_dtype", "eos_token_id", "pad_token_id", "bos_token_id",
    "quantization_config", "compression_config", "head_dtype", "transformers_version",
)  # fmt: skip


class InklingTextConfig(PretrainedConfig):
    """The decoder's block, or a whole text-only config.json.

    `vocab_size` is the number of valid ids and `padded_vocab_size` the stored rows, so that the
    engine samples valid ids only.
    """

    model_type = "inkling_model"
    has_no_defaults_at_init: ClassVar[bool] = True

    # A config class without an __init__ of its own is turned into a dataclass and loses these.
    def __init__(self, **raw: Any) -> None:
        parsed = parse({**raw, "model_type": raw.get("model_type") or "inkling_model"})
        passed = {key: raw[key] for key in _PASSED_ON if raw.get(key) is not None}
        super().__init__(tie_word_embeddings=False, **passed, **_original_fields(parsed.text, raw))
        self.mtp_config = _mtp_fields(parsed)
        # Speculative decoding knows the original dialect's type only.
        self.model_type = "inkling_model"

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(key, _named(value) if key == "quantization_config" else value)


class InklingHfTextConfig(InklingTextConfig):
    """The same under the type that Hugging Face writes."""

    model_type = "inkling_text"

    def __init__(self, **raw: Any) -> None:
        super().__init__(**raw)


class InklingTowerConfig(PretrainedConfig):
    """A tower's block as the file gives it; `config.py` checks it as part of the whole."""

    model_type = "inkling_tower"
    has_no_defaults_at_init: ClassVar[bool] = True

    def __init__(self, **raw: Any) -> None:
        raw.pop("model_type", None)
        super().__init__(**raw)
        self._given = tuple(raw)

    def given(self) -> dict[str, Any]:
        """The keys of the file, with the values that stand now."""
        return {key: getattr(self, key) for key in self._given}


class InklingMMConfig(PretrainedConfig):
    """A config.json with a decoder and up to two towers."""

    model_type = "inkling_mm_model"
    has_no_defaults_at_init: ClassVar[bool] = True
    sub_configs: ClassVar[dict[str, type[PretrainedConfig]]] = {
        "text_config": InklingTextConfig,
        "vision_config": InklingTowerConfig,
        "audio_config": InklingTowerConfig,
    }

    def __init__(self, **raw: Any) -> None:
        raw = {key: _as_dict(value) for key, value in raw.items()}
        parsed = parse({**raw, "model_type": "inkling_mm_model"})
        blocks = {key: raw.pop(key, None) for key in ("text_config", "vision_config",
                                                      "audio_config", "mtp_config")}  # fmt: skip
        raw.pop("tie_word_embeddings", None)
        raw.pop("model_type", None)
        self.text_config = InklingTextConfig(
            **{**(blocks["text_config"] or {}), "mtp_config": blocks["mtp_config"]}
        )
        self.vision_config = InklingTowerConfig(**(blocks["vision_config"] or {}))
        self.audio_config = InklingTowerConfig(**(blocks["audio_config"] or {}))
        super().__init__(tie_word_embeddings=False, **raw)
        self.mtp_config = _mtp_fields(parsed)
        # The V1 speculative loader reads the slot under this name from every multimodal target.
        self.image_token_index = parsed.image_token

    def __setattr__(self, key: str, value: Any) -> None:
        if key == "quantization_config":
            value = _named(value)
            # Speculative decoding goes on with the text block alone.
            self.text_config.quantization_config = value
        super().__setattr__(key, value)

    def get_text_config(self, *_: Any, **__: Any) -> InklingTextConfig:
        return self.text_config


def _named(block: Any) -> Any:
    """A `quantization_config` with the method that ModelOpt's own file leaves out.

    vLLM looks for a producer there, which Inkling's released file does not have.
    """
    if (
        isinstance(block, dict)
        and not block.get("quant_method")
        and "quant_algo" in (block.get("quantization") or {})
    ):
        return {**block, "quant_method": "modelopt"}
    return block


def describe(config: PretrainedConfig) -> InklingConfig:
    """The plain description of a config as it stands now, after overrides and rewriting.

    Takes either entry's config, or the text config that speculative decoding turned into a
    draft's. Raises ConfigError.
    """
    if isinstance(config, InklingMMConfig):
        raw = {
            "model_type": "inkling_mm_model",
            "text_config": _text_fields(config.text_config),
            "vision_config": config.vision_config.given() or None,
            "audio_config": config.audio_config.given() or None,
            "mtp_config": config.mtp_config or None,
        }
        for key in ("eos_token_id", "image_token_id", "audio_token_id", "image_bos_token_id",
                    "audio_bos_token_id"):  # fmt: skip
            raw[key] = getattr(config, key, None)
        return parse(raw)
    if not isinstance(config, InklingTextConfig):
        raise ConfigError(
            f"an Inkling model needs a config of this package; found {type(config).__name__}; "
            "let the plugin register its config classes (VLLM_PLUGINS may leave it out)"
        )
    return parse(_text_fields(config))


def _text_fields(config: InklingTextConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name, None) for name in config._fields}
    return {**fields, "model_type": config.model_type, "mtp_config": config.mtp_config or None,
            "eos_token_id": getattr(config, "eos_token_id", None)}  # fmt: skip


def _original_fields(text: TextConfig, raw: dict[str, Any]) -> dict[str, Any]:
    """A decoder in the original dialect, plus the names under which vLLM looks things up."""
    fields = {
        "vocab_size": text.vocab_size,
        "padded_vocab_size": text.padded_vocab_size,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.global_heads,
        "num_key_value_heads": text.global_kv_heads,
        "head_dim": text.global_head_dim,
        "swa_num_attention_heads": text.local_heads,
        "swa_num_key_value_heads": text.local_kv_heads,
        "swa_head_dim": text.local_head_dim,
        "d_rel": text.rel_dim,
        "rel_extent": text.rel_extent,
        "sliding_window_size": text.window,
        "local_layer_ids": list(text.local_layers),
        "dense_intermediate_size": text.dense_width,
        "intermediate_size": text.expert_width,
        "n_routed_experts": text.num_experts,
        "num_experts_per_tok": text.top_k,
        "n_shared_experts": text.num_sinks,
        "route_scale": text.route_scale,
        "sconv_kernel_size": text.conv_taps,
        "rms_norm_eps": text.norm_eps,
        "logits_mup_width_multiplier": text.logit_divisor,
        "log_scaling_n_floor": text.log_floor or None,
        "log_scaling_alpha": text.log_alpha or None,
        "max_position_embeddings": text.max_positions,
    }
    if text.dense_layers == tuple(range(len(text.dense_layers))):
        fields["dense_mlp_idx"] = len(text.dense_layers)
    else:
        fields["mlp_layer_types"] = [
            "dense" if layer in text.dense_layers else "sparse" for layer in range(text.num_layers)
        ]
    fields["_fields"] = [*fields, "num_nextn_predict_layers", "chain_hidden_post_norm"]
    # vLLM's checks on expert parallelism look for this name.
    fields["num_experts"] = text.num_experts
    return fields


def _mtp_fields(config: InklingConfig) -> dict[str, Any]:
    if config.mtp is None:
        return {}
    return {
        "num_nextn_predict_layers": config.mtp.num_depths,
        "local_layer_ids": list(config.mtp.local_depths),
        "chain_hidden_post_norm": config.mtp.chain_norm,
        "local_extent": config.mtp.local_extent,
    }


def _as_dict(value: Any) -> Any:
    return value.to_dict() if isinstance(value, PretrainedConfig) else value
