"""Tiny checkpoints: what transformers loads from them, what their tokens mean, what they hold.

The expected tensor names are written out again below from the published table, and the sizes of the
released models that follow from our list are compared with the published counts.
"""

import hashlib
import json
import subprocess
import sys
import time

import hf_oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from inkling_portable.commands import tiny, tiny_tensors
from inkling_portable.commands.released_configs import released
from inkling_portable.commands.tiny_tokenizer import special_tokens
from inkling_portable.model.config import parse

PRESETS = ("text", "omni", "small-like", "large-like")
PROMPT = [(7 * i * i + 3 * i) % 440 for i in range(70)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder per preset, written on first use."""
    root, written = tmp_path_factory.mktemp("tiny"), {}

    def folder(preset):
        if preset not in written:
            written[preset] = root / preset
            tiny.write_tiny(written[preset], preset)
        return written[preset]

    return folder


@pytest.fixture(scope="module")
def text_model(folders):
    return hf_oracle.load(folders("text"))[0]


def read(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def tensors(folder):
    """Name to (dtype, shape) over all weight files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a dictionary
                piece = handle.get_slice(name)
                assert name not in found
                found[name] = (piece.get_dtype(), tuple(piece.get_shape()))
    return found


def digest(folder):
    files = sorted(folder.iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# What other readers make of it. -----------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_transformers_loads_every_key(folders, preset):
    _, report = hf_oracle.load(folders(preset))
    assert not any(report.values()), report


def test_a_sharded_checkpoint_loads_like_a_whole_one(folders, text_model, tmp_path):
    tiny.write_tiny(tmp_path, "text", shard_mb=1)
    index = read(tmp_path, "model.safetensors.index.json")
    files = sorted(file.name for file in tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    for file in files:
        with safe_open(tmp_path / file, "pt") as handle:
            assert all(index["weight_map"][name] == file for name in handle.keys())  # noqa: SIM118
        # A tensor above the limit stands alone; the header is not counted.
        single = len(load_file(tmp_path / file)) == 1
        assert single or (tmp_path / file).stat().st_size < 1.1e6
    whole, parts = load_file(folders("text") / "model.safetensors"), {}
    for file in files:
        parts |= load_file(tmp_path / file)
    assert whole.keys() == parts.keys() == index["weight_map"].keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    model, report = hf_oracle.load(tmp_path)
    assert not any(report.values()), report
    loaded, known = model.state_dict(), text_model.state_dict()
    assert loaded.keys() == known.keys()
    assert all(torch.equal(loaded[name], known[name]) for name in known)
    # Tensors start at other addresses in such files, by which some CPUs choose other kernels.
    expected = hf_oracle.logits(text_model, PROMPT)
    torch.testing.assert_close(hf_oracle.logits(model, PROMPT), expected)


@pytest.mark.parametrize("preset", ["text", "small-like"])
def test_logits_are_lively_but_sane(folders, preset):
    model, _ = hf_oracle.load(folders(preset))
    logits = hf_oracle.logits(model, PROMPT)
    valid = parse(read(folders(preset))).text.vocab_size
    assert logits.shape == (len(PROMPT), valid)
    assert torch.isfinite(logits).all()
    assert 0.5 < logits.std() < 5
    assert len(set(logits.argmax(-1).tolist())) > 10


def test_every_parameter_moves_the_logits(text_model):
    """Zeroing a parameter, or undoing a scale, must show: else a reader could leave it out.

    Biases and scales are replaced by the neutral value that a forgetful reader has in their place.
    """
    base = hf_oracle.logits(text_model, PROMPT)
    unmoved, seen = [], 0
    # The gate's bias is a buffer, so parameters alone would leave it out.
    for name, value in text_model.state_dict().items():
        neutral = 1.0 if "norm" in name or name.endswith("global_scale") else 0.0
        kept = value.clone()
        value.fill_(neutral)
        moved = (hf_oracle.logits(text_model, PROMPT) - base).abs().max().item()
        value.copy_(kept)
        seen += 1
        # Far above the 1e-5 that a comparison in fp32 allows.
        if not moved > 1e-2:
            unmoved.append((name, moved))
    assert seen > 80
    assert not unmoved
    assert torch.equal(hf_oracle.logits(text_model, PROMPT), base)


def test_every_tower_parameter_moves_the_rows(folders):
    model, _ = hf_oracle.load(folders("omni"))
    config = parse(read(folders("omni")))
    generator = torch.Generator().manual_seed(0)
    patch = config.vision.patch_size
    pixels = torch.randn(5, 2, patch, patch, 3, generator=generator)
    levels = torch.randint(0, 16, (40, 80), generator=generator)

    @torch.no_grad()
    def rows():
        vision = model.model.get_image_features(pixels).pooler_output
        return torch.cat(
            [vision.flatten(), model.model.audio_tower(levels).pooler_output.flatten()]
        )

    base, seen = rows(), 0
    for part in (model.model.vision_tower, model.model.audio_tower):
        for name, parameter in part.named_parameters():
            kept = parameter.data.clone()
            parameter.data.fill_(1.0 if "norm" in name else 0.0)
            assert (rows() - base).abs().max() > 1e-2, name
            parameter.data.copy_(kept)
            seen += 1
    assert seen == 4 + 3 + 1 + 2
    assert 0.3 < base.std() < 3


def test_values_differ_within_a_tensor_and_between_tensors(folders):
    """A constant or repeated tensor would hide a swapped or broadcast one."""
    firsts = {}
    for file in ("model.safetensors", "mtp.safetensors"):
        for name, tensor in load_file(folders("omni") / file).items():
            assert tensor.isfinite().all(), name
            assert (tensor != 0).all(), name
            if tensor.numel() > 1:
                assert tensor.unique().numel() > tensor.numel() / 2, name
            else:
                assert abs(tensor.item() - 1) > 0.05, name
            key = tuple(tensor.flatten()[:1].tolist())
            assert key not in firsts, (name, firsts.get(key))
            firsts[key] = name


def test_padding_rows_would_win_if_they_were_sampled(folders):
    """The text preset's unembedding has padding rows that are not small."""
    text = parse(read(folders("text"))).text
    table = load_file(folders("text") / "model.safetensors")["model.llm.unembed.weight"]
    assert text.padded_vocab_size == table.shape[0] > text.vocab_size
    assert table[text.vocab_size :].std() > 3 * table[: text.vocab_size].std()


# Names and shapes. ------------------------------------------------------------------------------


def expected_names(raw):
    """Tensor names by the published table, from the raw original-dialect config."""
    text = raw.get("text_config", raw)
    attention = [
        "attn.wq_du.weight", "attn.wk_dv.weight", "attn.wv_dv.weight", "attn.wr_du.weight",
        "attn.wo_ud.weight", "attn.q_norm.weight", "attn.k_norm.weight", "attn.k_sconv.weight",
        "attn.v_sconv.weight", "attn.rel_logits_proj.proj", "attn_norm.weight", "mlp_norm.weight",
        "attn_sconv.weight", "mlp_sconv.weight",
    ]  # fmt: skip
    dense = ["mlp.w13_dn.weight", "mlp.w2_md.weight", "mlp.global_scale"]
    sparse = [
        "mlp.experts.w13_weight", "mlp.experts.w2_weight", "mlp.gate.weight", "mlp.gate.bias",
        "mlp.gate.global_scale", "mlp.shared_experts.shared_w13_weight",
        "mlp.shared_experts.shared_w2_weight",
    ]  # fmt: skip
    names = ["embed.weight", "unembed.weight", "embed_norm.weight", "norm.weight"]
    for layer in range(text["num_hidden_layers"]):
        block = attention + (dense if layer < text["dense_mlp_idx"] else sparse)
        names += [f"layers.{layer}.{name}" for name in block]
    names = [f"model.llm.{name}" for name in names]
    if "vision_config" in raw:
        stages = raw["vision_config"]["n_layers"]
        names += [f"model.visual.layers.linear_{i}.weight" for i in range(stages)]
        names += [f"model.visual.layers.norm_{i}.weight" for i in range(stages - 1)]
        names += ["model.visual.final_norm.weight"]
    if "audio_config" in raw:
        names += ["model.audio.encoder.weight", "model.audio.final_norm.weight"]
    for depth in range(raw.get("mtp_config", {}).get("num_nextn_predict_layers", 0)):
        block = ["hidden_norm.weight", "embed_norm.weight", "input_proj.weight"]
        block += [f"transformer_block.{name}" for name in attention + dense]
        names += [f"model.mtp.layers.{depth}.{name}" for name in block]
    return names


@pytest.mark.parametrize("preset", PRESETS)
def test_names_follow_the_published_table(folders, preset):
    raw = read(folders(preset))
    expected = expected_names(raw)
    assert len(set(expected)) == len(expected)
    assert set(tensors(folders(preset))) == set(expected)
    in_own_file = set(load_file(folders(preset) / "mtp.safetensors"))
    assert in_own_file == {name for name in expected if ".mtp." in name}


@pytest.mark.parametrize(
    ("name", "trunk", "total", "text", "vision", "audio", "mtp"),
    [
        ("Inkling", 1392, 1552, 947.026e9, 83.74e6, 7.87e6, 5.260e9),
        ("Inkling-Small", 888, 1048, 263.655e9, 64.08e6, 5.25e6, 2.232e9),
    ],
)
def test_the_released_models_have_the_published_sizes(name, trunk, total, text, vision, audio, mtp):
    config = parse(released(name))
    specs = list(tiny_tensors.tensor_specs(config))
    depths = list(tiny_tensors.mtp_specs(config))
    assert (len(specs), len(specs) + len(depths)) == (trunk, total)
    assert {spec.name for spec in specs + depths} == set(expected_names(released(name)))

    def size(prefix):
        chosen = (spec for spec in specs + depths if spec.name.startswith(prefix))
        return sum(torch.Size(spec.shape).numel() for spec in chosen)

    # The published figures are rounded to the digits given.
    assert size("model.llm.") == pytest.approx(text, abs=0.5e6)
    assert size("model.visual.") == pytest.approx(vision, abs=0.005e6)
    assert size("model.audio.") == pytest.approx(audio, abs=0.005e6)
    assert size("model.mtp.") == pytest.approx(mtp, abs=0.5e6)


@pytest.mark.parametrize("preset", PRESETS)
def test_only_the_gate_is_always_fp32(folders, preset):
    stored = "BF16" if preset.endswith("-like") else "F32"
    for name, (dtype, _) in tensors(folders(preset)).items():
        gate = name.endswith(("gate.bias", "gate.global_scale"))
        assert dtype == ("F32" if gate else stored), name


def test_geometry_of_the_text_preset(folders):
    """The geometry that the speed figures are quoted for."""
    text = parse(read(folders("text"))).text
    assert [text.layer_is_local(i) for i in range(4)] == [True, True, False, True]
    local, full = text.attention(0), text.attention(2)
    assert (text.hidden_size, text.num_layers, text.dense_layers) == (128, 4, (0,))
    assert (local.heads, local.head_dim, local.kv_heads) == (4, 32, 2)
    assert (full.heads, full.head_dim, full.kv_heads) == (4, 32, 1)
    assert (full.rel_dim, full.extent, local.window) == (8, 32, 16)
    assert (text.num_experts, text.expert_width, text.top_k, text.num_sinks) == (8, 64, 2, 2)
    assert text.dense_width == 192
    assert text.vocab_size < text.padded_vocab_size < 1000
    assert text.log_floor == 24


@pytest.mark.parametrize(
    ("preset", "name"), [("small-like", "Inkling-Small"), ("large-like", "Inkling")]
)
def test_ratios_of_the_published_configs_are_kept(folders, preset, name):
    ours, theirs = parse(read(folders(preset))), parse(released(name))
    assert ours.text.num_layers == 12
    # The first twelve layers of the published pattern.
    assert ours.text.local_layers == tuple(i for i in theirs.text.local_layers if i < 12)
    assert ours.text.dense_layers == theirs.text.dense_layers
    assert ours.mtp == type(ours.mtp)(8, theirs.mtp.local_depths, False, ours.text.window)
    for field in ("local_kv_heads", "global_kv_heads", "top_k", "num_sinks", "route_scale",
                  "logit_divisor", "conv_taps", "log_alpha", "norm_eps"):  # fmt: skip
        assert getattr(ours.text, field) == getattr(theirs.text, field), field
    for above, below in (("dense_width", "hidden_size"), ("hidden_size", "expert_width"),
                         ("rel_extent", "window"), ("local_heads", "global_heads")):  # fmt: skip
        ratio = getattr(theirs.text, above) / getattr(theirs.text, below)
        assert getattr(ours.text, above) / getattr(ours.text, below) == ratio
    heads = ours.text.local_heads * ours.text.local_head_dim / ours.text.hidden_size
    assert heads == theirs.text.local_heads * theirs.text.local_head_dim / theirs.text.hidden_size
    for ranks in (2, 4, 8):
        ours.text.check_tensor_parallel(ranks)


# Tokens. ----------------------------------------------------------------------------------------

NAMED = (
    "<|endoftext|>", "<|message_user|>", "<|message_model|>", "<|message_system|>",
    "<|message_tool|>", "<|content_text|>", "<|content_image|>", "<|content_model_end_sampling|>",
    "<|content_thinking|>", "<|end_message|>", "<|content_audio_input|>", "<|content_tool_error|>",
    "<|unused_200024|>", "<|audio_end|>", "<|content_invoke_tool_json|>", "<|unused_200053|>",
    "<|unused_200054|>", "<|content_invoke_tool_text|>",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(folders):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folders("text"))


@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < 500 for token in ids)


def test_every_valid_id_has_one_token(folders, tokenizer):
    vocab = parse(read(folders("text"))).text.vocab_size
    assert len(tokenizer) == vocab
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab))
    for token in NAMED:
        ids = tokenizer.encode(token, add_special_tokens=False)
        assert ids == [tokenizer.convert_tokens_to_ids(token)], token
        assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    assert tokenizer.encode("\x00\xff", add_special_tokens=False)[0] == 0


def test_config_tokenizer_and_generation_agree_on_ids(folders, tokenizer):
    eos = tokenizer.convert_tokens_to_ids("<|content_model_end_sampling|>")
    assert tokenizer.eos_token_id == eos
    assert tokenizer.bos_token_id is None
    for preset in ("text", "omni"):
        assert parse(read(folders(preset))).eos_ids == (eos,)
        assert read(folders(preset), "generation_config.json") == {
            "eos_token_id": eos,
            "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        }
    omni = parse(read(folders("omni")))
    found = (omni.image_token, omni.audio_token, omni.image_opener, omni.audio_opener)
    named = ("<|unused_200054|>", "<|unused_200053|>", "<|content_image|>",
             "<|content_audio_input|>")  # fmt: skip
    assert found == tuple(tokenizer.convert_tokens_to_ids(token) for token in named)


def test_the_released_vocabulary_size_gives_the_released_ids():
    ids = special_tokens(200058)
    published = (199999, 200000, 200001, 200002, 200003, 200004, 200005, 200006, 200008, 200010,
                 200020, 200022, 200024, 200043, 200049, 200053, 200054, 200057)  # fmt: skip
    assert tuple(ids[token] for token in NAMED) == published
    assert max(ids.values()) == 200057
    assert "<|unused_200053|>" in ids
    assert "<|unused_200007|>" in ids


@pytest.mark.parametrize("vocab", [315, 316, 1341, 9000])
def test_a_vocabulary_of_any_size_is_complete(tmp_path, vocab):
    from tokenizers import Tokenizer

    from inkling_portable.commands.tiny_tokenizer import write_tokenizer

    write_tokenizer(tmp_path, vocab, 100)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert sorted(made.get_vocab().values()) == list(range(vocab))
    text = "the other letters <|message_user|>é"
    assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


# The command. -----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes(folders, tmp_path):
    tiny.write_tiny(tmp_path / "again", "text")
    assert digest(tmp_path / "again") == digest(folders("text"))
    tiny.write_tiny(tmp_path / "other", "text", seed=1)
    changed = digest(tmp_path / "other")
    same = {file for file, value in digest(folders("text")).items() if changed[file] == value}
    assert "model.safetensors" not in same
    assert {"config.json", "tokenizer.json"} <= same


def test_overrides_reach_config_and_weights(tmp_path):
    tiny.write_tiny(
        tmp_path, "omni", vocab=320, layers=7, dtype="bfloat16", mtp_depths=3, hidden_size=64,
        sliding_window_size=5,
    )  # fmt: skip
    config = parse(read(tmp_path))
    assert config.text.hidden_size == config.vision.out_width == config.audio.out_width == 64
    assert (config.text.num_layers, config.text.window, config.mtp.num_depths) == (7, 5, 3)
    assert config.text.local_layers == (0, 1, 3, 4, 5)
    found = tensors(tmp_path)
    assert found["model.llm.layers.0.attn.rel_logits_proj.proj"] == ("BF16", (8, 5))
    assert found["model.llm.embed.weight"] == ("BF16", (384, 64))
    _, report = hf_oracle.load(tmp_path)
    assert not any(report.values()), report


def test_parts_can_be_left_out(tmp_path):
    tiny.write_tiny(tmp_path, "small-like", towers=False, mtp_depths=0, layers=1)
    config = parse(read(tmp_path))
    assert config.vision is config.audio is config.mtp is None
    assert read(tmp_path)["architectures"] == ["InklingForCausalLM"]
    assert not (tmp_path / "mtp.safetensors").exists()
    assert not (tmp_path / "processor_config.json").exists()
    _, report = hf_oracle.load(tmp_path)
    assert not any(report.values()), report


def test_the_processor_files_are_what_transformers_reads(folders):
    from transformers import InklingFeatureExtractor

    config = parse(read(folders("omni")))
    settings_file = read(folders("omni"), "processor_config.json")
    extractor = InklingFeatureExtractor.from_pretrained(folders("omni"))
    assert (extractor.hop_length, extractor.n_fft) == (800, 1600)
    assert extractor.mel_filters.shape[0] == config.audio.mel_bins
    size = settings_file["image_processor"]["size"]
    assert size == {"height": config.vision.patch_size, "width": config.vision.patch_size}
    assert settings_file["num_dmel_bins"] == config.audio.mel_levels
    spread = settings_file["dmel_min_value"], settings_file["dmel_max_value"]
    assert spread == (config.audio.min_value, config.audio.max_value)


def test_force_replaces_a_checkpoint_and_nothing_else(tmp_path, capsys):
    folder = tmp_path / "model"
    assert tiny.main([str(folder), "--shard-mb", "1"]) == 0
    (folder / "notes.txt").write_text("mine")
    assert tiny.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--force" in error
    assert len(list(folder.glob("model-*"))) > 2
    assert tiny.main([str(folder), "--force"]) == 0
    assert not list(folder.glob("model-*"))
    assert not (folder / "model.safetensors.index.json").exists()
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--preset", "huge"], "huge"),
        (["--vocab", "314"], "314"),
        (["--vocab", "200059"], "200059"),
        (["--vocab", "many"], "many"),
        (["--layers", "0"], "num_hidden_layers"),
        (["--dtype", "int4"], "int4"),
        (["--weights", "int4"], "int4"),
        (["--weights", "mxfp4", "--layout", "modelopt"], "mxfp4 as modelopt"),
        (["--layout", "quark"], "--weights"),
        (["--shard-mb", "0"], "0.0"),
        (["--shard-mb", "nan"], "nan"),
        (["--mtp-depths", "-1"], "num_nextn_predict_layers"),
        (["--mtp-depths", "9"], "at most 8 MTP depths; found 9"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_a_bad_argument_is_one_sentence(tmp_path, capsys, arguments, named):
    assert tiny.main([str(tmp_path / "model"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("inkling-portable tiny: ")
    assert error.count("\n") == 1
    assert named in error
    assert not (tmp_path / "model").exists()


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path):
    tiny.write_tiny(tmp_path, preset="text", dtype="float32")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_a_file_in_the_way_and_an_unknown_override_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        tiny.write_tiny(tmp_path / "file")
    with pytest.raises(ValueError, match="hidden_sise"):
        tiny.write_tiny(tmp_path / "model", hidden_sise=3)
    with pytest.raises(ValueError, match="num_attention_heads"):
        tiny.write_tiny(tmp_path / "model", num_attention_heads=3, num_key_value_heads=2)


def test_importing_the_command_imports_nothing_heavy():
    code = (
        "import sys, inkling_portable.commands.tiny; "
        "sys.exit(bool({'torch', 'tokenizers', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_text_preset_is_written_quickly(tmp_path):
    tiny.write_tiny(tmp_path / "warm", "text")
    start = time.process_time()
    tiny.write_tiny(tmp_path / "timed", "text")
    assert time.process_time() - start < 2
