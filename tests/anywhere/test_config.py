"""Reading config.json: both dialects mean the same, and what cannot be served is one sentence.

The Hugging Face dialect is produced by transformers' own config class and by an inverse map written
here from the field table; neither shares code with the parser.
"""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_portable.commands.released_configs import released
from inkling_portable.model.config import ConfigError, parse

NAMES = ("Inkling", "Inkling-Small")


def to_hugging_face(original):
    """The Hugging Face spelling of an original-dialect config; flags and ranges it drops go."""
    text = dict(original["text_config"])
    layers, local = text["num_hidden_layers"], text.pop("local_layer_ids")
    dense = text.pop("dense_mlp_idx")
    expert, wide = text.pop("intermediate_size"), text.pop("dense_intermediate_size")
    for dropped in (
        "use_gate_bias", "use_global_scale", "norm_after_topk", "gate_activation", "use_embed_norm",
        "inference_moe_w13_interleaved", "use_sconv", "q_bias", "o_bias", "torch_dtype",
        "final_logit_softcapping",
    ):  # fmt: skip
        text.pop(dropped, None)
    mtp = original["mtp_config"]
    text |= {
        "model_type": "inkling_text",
        "layer_types": ["hybrid_sliding" if i in local else "hybrid" for i in range(layers)],
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(layers)],
        "intermediate_size": wide,
        "moe_intermediate_size": expert,
        "conv_kernel_size": text.pop("sconv_kernel_size"),
        "max_position_embeddings": text.pop("model_max_length"),
        "num_mtp_layers": mtp["num_nextn_predict_layers"],
        "mtp_local_layer_ids": mtp["local_layer_ids"],
        "chain_hidden_post_norm": mtp["chain_hidden_post_norm"],
        "mtp_hidden_states_first": True,
    }
    vision, audio = original["vision_config"], original["audio_config"]
    return {
        "architectures": original["architectures"],
        "model_type": "inkling_mm_model",
        "eos_token_id": original["eos_token_id"],
        "text_config": text,
        "vision_config": {
            "model_type": "inkling_vision",
            "text_hidden_size": vision["decoder_dmodel"],
            "patch_size": vision["patch_size"],
            "temporal_patch_size": vision["temporal_patch_size"],
            "num_channels": vision["n_channels"],
            "num_hidden_layers": vision["n_layers"],
        },
        "audio_config": {
            "model_type": "inkling_audio",
            "text_hidden_size": audio["decoder_dmodel"],
            "n_mel_bins": audio["n_mel_bins"],
            "mel_vocab_size": audio["mel_vocab_size"],
        },
    }


def without_mel_range(config):
    """The Hugging Face dialect keeps the dMel range in the processor."""
    return replace(config, audio=replace(config.audio, min_value=None, max_value=None))


@st.composite
def originals(draw):
    """Original-dialect configs of any valid geometry."""
    raw = released("Inkling-Small")
    text = raw["text_config"]
    layers = draw(st.integers(1, 14))
    kv, local_kv = draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([1, 2, 4]))
    depths = draw(st.integers(1, 4))
    experts = draw(st.integers(1, 16))
    vocab = draw(st.integers(300, 2000))
    expert = draw(st.integers(1, 4096))
    text.update(
        num_hidden_layers=layers,
        num_key_value_heads=kv,
        num_attention_heads=kv * draw(st.integers(1, 4)),
        swa_num_key_value_heads=local_kv,
        swa_num_attention_heads=local_kv * draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([16, 32, 128])),
        swa_head_dim=draw(st.sampled_from([16, 64])),
        hidden_size=draw(st.integers(1, 512)),
        d_rel=draw(st.integers(1, 32)),
        rel_extent=draw(st.integers(1, 2048)),
        sliding_window_size=draw(st.integers(1, 1024)),
        local_layer_ids=draw(st.lists(st.integers(0, layers - 1), unique=True).map(sorted)),
        dense_mlp_idx=draw(st.integers(0, layers)),
        intermediate_size=expert,
        moe_intermediate_size=expert,
        dense_intermediate_size=draw(st.integers(1, 4096)),
        n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        n_shared_experts=draw(st.integers(1, 3)),
        sconv_kernel_size=draw(st.integers(1, 6)),
        vocab_size=vocab,
        unpadded_vocab_size=draw(st.integers(200, vocab)),
        log_scaling_n_floor=draw(st.none() | st.integers(1, 10**6)),
        route_scale=draw(st.sampled_from([1.0, 2.5, 8.0])),
    )
    raw["mtp_config"].update(
        num_nextn_predict_layers=depths,
        chain_hidden_post_norm=draw(st.booleans()),
        local_layer_ids=draw(st.lists(st.integers(0, depths - 1), unique=True).map(sorted)),
    )
    raw["eos_token_id"] = draw(st.integers(0, text["unpadded_vocab_size"] - 1))
    for tower in ("vision_config", "audio_config"):
        raw[tower]["decoder_dmodel"] = text["hidden_size"]
    raw["vision_config"].update(patch_size=draw(st.integers(2, 48)))
    return raw


@pytest.mark.parametrize("name", NAMES)
def test_released_values_arrive_under_our_names(name):
    raw = released(name)
    config, text = parse(raw), raw["text_config"]
    large = name == "Inkling"
    assert config.text.hidden_size == (6144 if large else 4096)
    assert config.text.expert_width == (3072 if large else 2048)
    assert config.text.dense_width == (24576 if large else 16384)
    assert config.text.dense_layers == (0, 1)
    assert len(config.text.local_layers) == (55 if large else 35)
    every_sixth = list(range(5, 66 if large else 42, 6))
    found = [i for i in range(config.text.num_layers) if not config.text.layer_is_local(i)]
    assert found == every_sixth
    assert (config.text.vocab_size, config.text.padded_vocab_size) == (200058, 201024)
    assert config.text.logit_divisor == (24.0 if large else 16.0)
    assert (config.text.log_floor, config.text.log_alpha) == (128000, 0.1)
    assert config.text.max_positions == 1048576
    assert config.eos_ids == (200006,)
    assert config.mtp.local_depths == (0, 2, 4, 5, 6, 7)
    assert not config.mtp.chain_norm
    assert (config.audio.mel_bins, config.audio.mel_levels) == (80, 16)
    # The fused projection widths of the two kinds of layer, as published.
    heads = 64 if large else 32
    assert config.text.attention(5).qkvr_sizes == (heads * 128, 1024, 1024, heads * 16)
    local_kv = text["swa_num_key_value_heads"] * 128
    assert config.text.attention(0).qkvr_sizes == (heads * 128, local_kv, local_kv, heads * 16)
    assert (config.text.attention(5).window, config.text.attention(5).extent) == (0, 1024)
    assert (config.text.attention(0).window, config.text.attention(0).extent) == (512, 512)
    assert config.text.attention(0).scale == 1 / 128
    assert config.mtp_attention(1) == config.text.attention(5)
    assert config.mtp_attention(2) == config.text.attention(0)
    assert [(s.in_features, s.out_features) for s in config.vision.stages()] == [
        (75, 128), (512, 320), (5120, 4800), (9600, config.text.hidden_size)
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reading_of_the_released_config_means_the_same(name):
    from transformers import InklingConfig

    raw = released(name)
    theirs = InklingConfig(**copy.deepcopy(raw)).to_dict()
    assert theirs["text_config"]["layer_types"].count("hybrid") == (11 if name == "Inkling" else 7)
    # Without the original block only their own MTP fields are left to read.
    theirs.pop("mtp_config", None)
    ours = parse(raw)
    read = parse(theirs)
    assert read.text == ours.text
    assert (read.mtp, read.vision, read.eos_ids) == (ours.mtp, ours.vision, ours.eos_ids)
    assert without_mel_range(read).audio == without_mel_range(ours).audio


@given(originals())
def test_both_dialects_mean_the_same(raw):
    assert parse(to_hugging_face(raw)) == without_mel_range(parse(raw))


@given(originals())
def test_transformers_reads_any_geometry_like_we_do(raw):
    from transformers import InklingConfig

    theirs = InklingConfig(**copy.deepcopy(raw)).to_dict()
    theirs.pop("mtp_config", None)
    assert parse(theirs).text == parse(raw).text
    assert parse(theirs).mtp == parse(raw).mtp


@given(originals())
def test_a_bare_text_config_means_the_same(raw):
    bare = raw["text_config"] | {k: raw[k] for k in ("mtp_config", "eos_token_id")}
    nested, alone = parse(raw), parse(bare)
    assert alone == replace(nested, vision=None, audio=None)


def test_an_object_that_gives_a_dictionary_is_read_too():
    from transformers import InklingConfig

    config = InklingConfig(**released("Inkling"))
    assert parse(config).text == parse(released("Inkling")).text


def test_reading_a_config_needs_no_torch():
    code = (
        "import sys, inkling_portable.model.config; "
        "sys.exit(bool({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What a missing or unusual field means. ---------------------------------------------------------


def small(**text):
    raw = released("Inkling-Small")
    for name, value in text.items():
        if value is ...:
            raw["text_config"].pop(name, None)
        else:
            raw["text_config"][name] = value
    return raw


def test_local_layers_fall_back_in_order():
    by_pattern = parse(small(local_layer_ids=...)).text.local_layers
    assert by_pattern == tuple(i for i in range(42) if i not in (5, 11, 17, 23, 29, 35, 41))
    kinds = ["hybrid_sliding"] + ["hybrid"] * 41
    assert parse(small(local_layer_ids=None, layer_types=kinds)).text.local_layers == (0,)
    assert parse(small(local_layer_ids=[3, 1], layer_types=kinds)).text.local_layers == (1, 3)
    assert parse(small(local_layer_ids=[])).text.local_layers == ()


def test_dense_layers_fall_back_in_order():
    kinds = ["sparse", "dense"] + ["sparse"] * 40
    assert parse(small(dense_mlp_idx=..., mlp_layer_types=kinds)).text.dense_layers == (1,)
    assert parse(small(dense_mlp_idx=0, mlp_layer_types=kinds)).text.dense_layers == ()
    assert parse(small(dense_mlp_idx=...), dense_layers={4, 2}).text.dense_layers == (2, 4)


def test_missing_sizes_take_the_global_value():
    text = parse(
        small(
            head_dim=...,
            swa_head_dim=...,
            swa_num_attention_heads=...,
            swa_num_key_value_heads=...,
            sconv_kernel_size=...,
        )
    ).text
    assert text.attention(0) == replace(text.attention(5), window=512, extent=512)
    assert text.attention(0).head_dim == 4096 // 32
    assert text.conv_taps == 4


def test_a_missing_log_floor_switches_the_gain_off():
    for value in (None, ...):
        assert parse(small(log_scaling_n_floor=value)).text.log_floor == 0


def test_a_leaked_expert_width_is_ignored_beside_the_original_fields():
    assert parse(small(moe_intermediate_size=3072)).text.expert_width == 2048


def test_one_width_for_both_kinds_of_layer_is_said(caplog):
    text = parse(small(moe_intermediate_size=..., dense_intermediate_size=...)).text
    assert text.expert_width == text.dense_width == 2048
    assert "intermediate_size 2048" in caplog.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vocab_size": 1024, "unpadded_vocab_size": ...}, (1024, 1024)),
        ({"vocab_size": 1024, "unpadded_vocab_size": 1000}, (1000, 1024)),
        ({"vocab_size": 1000, "unpadded_vocab_size": ..., "padded_vocab_size": 1024}, (1000, 1024)),
        # All three at once: the smallest is the number of valid ids.
        (
            {"vocab_size": 1024, "unpadded_vocab_size": 1000, "padded_vocab_size": 1024},
            (1000, 1024),
        ),
        (
            {"vocab_size": 1000, "unpadded_vocab_size": 1020, "padded_vocab_size": 1024},
            (1000, 1024),
        ),
    ],
)
def test_valid_and_stored_vocabulary(fields, expected):
    raw = small(**fields) | {"eos_token_id": 7}
    text = parse(raw).text
    assert (text.vocab_size, text.padded_vocab_size) == expected


@pytest.mark.parametrize("tower", ["vision", "audio"])
def test_a_tower_without_output_width_is_disabled(tower):
    for change in ("null", "absent", "block absent"):
        raw = released("Inkling")
        if change == "null":
            raw[f"{tower}_config"] = {"decoder_dmodel": None, "text_hidden_size": 6144}
        elif change == "absent":
            del raw[f"{tower}_config"]["decoder_dmodel"]
        else:
            del raw[f"{tower}_config"]
        assert getattr(parse(raw), tower) is None


def test_a_default_slot_beyond_a_small_vocabulary_is_left_to_the_tokenizer():
    raw = released("Inkling") | {"eos_token_id": 7, "image_token_id": 200054, "audio_token_id": 5}
    raw["text_config"] |= {"vocab_size": 1024, "unpadded_vocab_size": 1000}
    assert (parse(raw).image_token, parse(raw).audio_token) == (None, 5)
    raw["text_config"] |= {"vocab_size": 201024, "unpadded_vocab_size": 200058}
    assert parse(raw).image_token == 200054


def test_a_draft_config_names_the_local_depths_where_the_trunk_names_its_layers():
    draft = released("Inkling")["text_config"] | {
        "model_type": "inkling_mtp",
        "num_nextn_predict_layers": 8,
        "local_layer_ids": [0, 2, 4, 5, 6, 7],
    }
    assert parse(draft).mtp == parse(released("Inkling")).mtp
    assert parse(draft).text == parse(released("Inkling")).text


def test_no_depths_means_no_drafting():
    raw = released("Inkling")
    raw["mtp_config"]["num_nextn_predict_layers"] = 0
    raw["mtp_config"]["local_layer_ids"] = []
    assert parse(raw).mtp is None
    with pytest.raises(ConfigError, match="mtp_config"):
        parse(raw).require_mtp()


def test_an_own_extent_of_the_local_depths():
    raw = released("Inkling")
    raw["mtp_config"]["local_extent"] = 96
    config = parse(raw)
    assert (config.mtp_attention(0).window, config.mtp_attention(0).extent) == (512, 96)
    assert config.mtp_attention(1).extent == 1024
    assert config.text.attention(0).extent == 512


# Refusals. --------------------------------------------------------------------------------------

REQUIRED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "d_rel",
    "rel_extent", "sliding_window_size", "dense_mlp_idx", "route_scale", "rms_norm_eps",
    "vocab_size", "logits_mup_width_multiplier", "log_scaling_alpha",
)  # fmt: skip

WRONG = {
    "local_layer_ids": ([0, 42], [-1], [True], [0.5], 3),
    "layer_types": (),
    "dense_mlp_idx": (43, -1),
    "num_attention_heads": (12, 0, "32", 3.5, True),
    "swa_num_attention_heads": (12,),
    "num_experts_per_tok": (257,),
    "n_shared_experts": (0,),
    "unpadded_vocab_size": (201025,),
    "padded_vocab_size": (1000,),
    "moe_intermediate_size": (1024,),
    "gate_activation": ("softmax",),
    "norm_after_topk": (False,),
    "shared_expert_sink": (False,),
    "inference_moe_w13_interleaved": (False,),
    "use_embed_norm": (False,),
    "use_sconv": (False,),
    "use_gate_bias": (False,),
    "use_global_scale": (False,),
    "q_bias": (True,),
    "o_bias": (True,),
    "hidden_act": ("gelu",),
    "final_logit_softcapping": (30.0,),
    "tie_word_embeddings": (True,),
    "v_head_dim": (64,),
    "mtp_hidden_states_first": (False,),
    "route_scale": (float("nan"), 0.0, "8"),
    "log_scaling_n_floor": (0, -5),
    "sconv_kernel_size": (0,),
    "d_rel": (True,),
    "model_type": (),
}


def assert_one_sentence(error, *parts):
    text = str(error.value)
    assert all(str(part) in text for part in parts), text
    assert "\n" not in text
    assert ";" in text, "a refusal has a cause and a remedy"
    assert not text.endswith(".")


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError) as error:
        parse(small(**{field: ...}))
    assert_one_sentence(error, field, "missing")


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_named(field, value):
    with pytest.raises(ConfigError) as error:
        parse(small(**{field: value}))
    assert_one_sentence(error, field, repr(value))


def test_contradicting_dialects_name_all_three_fields():
    with pytest.raises(ConfigError) as error:
        parse(small(moe_intermediate_size=4096))
    assert_one_sentence(
        error, "moe_intermediate_size", 4096, "dense_intermediate_size", 16384,
        "intermediate_size", 2048,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("block", "field", "value", "named"),
    [
        ("vision_config", "n_layers", ..., "n_layers"),
        ("vision_config", "patch_size", ..., "patch_size"),
        ("vision_config", "temporal_patch_size", ..., "temporal_patch_size"),
        ("vision_config", "n_channels", ..., "n_channels"),
        ("vision_config", "use_vision_norm", ..., "use_vision_norm"),
        ("vision_config", "vision_encoder_type", ..., "vision_encoder_type"),
        ("vision_config", "vision_encoder_type", "linear", "linear"),
        ("vision_config", "use_vision_norm", False, "use_vision_norm"),
        ("vision_config", "decoder_dmodel", 100, "decoder_dmodel"),
        ("vision_config", "patch_size", 1, "patch_size"),
        ("audio_config", "n_mel_bins", ..., "n_mel_bins"),
        ("audio_config", "mel_vocab_size", ..., "mel_vocab_size"),
        ("audio_config", "dmel_min_value", ..., "dmel_min_value"),
        ("audio_config", "dmel_max_value", ..., "dmel_max_value"),
        ("audio_config", "dmel_max_value", -8.0, "dmel_max_value"),
        ("audio_config", "use_audio_norm", ..., "use_audio_norm"),
        ("audio_config", "audio_mode", "flow", "flow"),
        ("audio_config", "bias", True, "bias"),
        ("mtp_config", "num_nextn_predict_layers", ..., "num_nextn_predict_layers"),
        ("mtp_config", "local_layer_ids", [8], "local_layer_ids"),
        ("mtp_config", "chain_hidden_post_norm", "no", "chain_hidden_post_norm"),
    ],
)
def test_a_fault_in_another_block_is_named(block, field, value, named):
    raw = released("Inkling")
    raw[block].pop(field)
    if value is not ...:
        raw[block][field] = value
    with pytest.raises(ConfigError) as error:
        parse(raw)
    assert_one_sentence(error, named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"text_config": None}, "text_config"),
        ({"text_config": 3}, "text_config"),
        ({"eos_token_id": 200058}, "eos_token_id"),
        ({"eos_token_id": [1, True]}, "eos_token_id"),
        ({"image_token_id": 200058}, "image_token_id"),
        ({"audio_token_id": 200058}, "audio_token_id"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_a_fault_at_the_top_is_named(changes, named):
    with pytest.raises(ConfigError) as error:
        parse(released("Inkling") | changes)
    assert_one_sentence(error, named)


def test_layer_kinds_must_be_known_and_complete():
    for field, kind in (("layer_types", "full"), ("mlp_layer_types", "moe")):
        gone = {"local_layer_ids": ..., "dense_mlp_idx": ...}
        with pytest.raises(ConfigError, match=kind):
            parse(small(**gone, **{field: [kind] * 42}), dense_layers=())
        with pytest.raises(ConfigError, match="42 entries"):
            parse(small(**gone, **{field: ["hybrid", "sparse"]}), dense_layers=())


def test_layers_split_evenly_or_not_at_all():
    large, little = (parse(released(name)).text for name in NAMES)
    for ranks in (1, 2, 4, 8, 16):
        large.check_tensor_parallel(ranks)
        little.check_tensor_parallel(ranks)
    assert large.attention(5).rank_kv_heads(16) == large.attention(0).rank_kv_heads(16) == 1
    for ranks, named in ((128, "num_attention_heads"), (3, "num_attention_heads"), (0, "rank")):
        with pytest.raises(ConfigError) as error:
            large.check_tensor_parallel(ranks)
        assert_one_sentence(error, named, ranks)
    with pytest.raises(ConfigError, match=r"use one of 1, 2, 4, 8, 16, 32$"):
        little.check_tensor_parallel(64)
