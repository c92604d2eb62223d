"""The number format that a checkpoint's block says, or that vLLM's own online settings ask for.

Blocks that are accepted are ones that vLLM's own class for them takes too; no engine is started.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer
from vllm.model_executor.models.utils import WeightsMapper

from inkling_portable.commands import tiny_quant
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.conversion.plan import make_plan
from inkling_portable.conversion.source import read_source
from inkling_portable.model import settings
from inkling_portable.model.config import ConfigError
from inkling_portable.model.quant_layouts import LAYOUTS, layout
from inkling_portable.model.weight_format import Quantisation, agree, read_block, rounded_at_start

MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
INT8 = {"dtype": "int8", "qscheme": "per_tensor"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def quark(whole: dict[str, Any], **layers: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "order"},
        "global_quant_config": {"weight": whole},
        "layer_quant_config": {name: {"weight": weight} for name, weight in layers.items()},
        "layer_type_quant_config": {},
    }


def compressed(**targets: dict[str, Any]) -> dict[str, Any]:
    groups = {
        f"group_{i}": {"targets": [target], "weights": weights, "input_activations": None}
        for i, (target, weights) in enumerate(targets.items())
    }
    return {"quant_method": "compressed-tensors", "format": "x", "ignore": [],
            "config_groups": groups}  # fmt: skip


def modelopt(algorithm: str, size: int = 16) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": size,
            "kv_cache_quant_algo": None, "exclude_modules": []}  # fmt: skip


def test_no_quantisation() -> None:
    assert read_block(None) == rounded_at_start(None) == Quantisation()


@pytest.mark.parametrize(
    ("method", "block", "expected"),
    [
        ("modelopt_fp4", modelopt("NVFP4"), "nvfp4"),
        ("modelopt_fp4", {"quant_method": "modelopt", "quantization": modelopt("NVFP4")}, "nvfp4"),
        ("quark", quark(MX), "mxfp4"),
        ("quark", quark(INT8, **{"*mlp.experts*": MX}), "mxfp4"),
        ("quark", quark(INT8, **{"*.layers.*.mlp.*": MX}), "mxfp4"),
        ("compressed-tensors", compressed(Linear=NVFP4), "nvfp4"),
        ("compressed-tensors", compressed(Linear=CHANNEL), "fp8"),
        (
            "compressed-tensors",
            compressed(**{"re:.*attn.*": BLOCK, "re:.*mlp[.]experts.*": NVFP4}),
            "nvfp4",
        ),
    ],
)
def test_known_blocks(method: str, block: dict[str, Any], expected: str) -> None:
    get_quantization_config(method).from_config(copy.deepcopy(block))
    found = read_block(block)
    assert found.format == expected
    assert found.layout is layout(expected, method.removesuffix("_fp4"))


@pytest.mark.parametrize("key", LAYOUTS)
def test_blocks_of_tiny_checkpoints_are_taken_by_vllm(key: str) -> None:
    form = LAYOUTS[key]
    experts = "model.llm.layers.{}.mlp.experts.{}_weight"
    kept = [experts.format(2, w) for w in ("w13", "w2")]
    made, _ = tiny_quant.blocks(form, kept, ["model.llm.layers.3.attn.wo_ud.weight"])
    assert read_block(made).layout is form
    assert read_block(made).experts_format(2, 8, ()) == "bf16"
    assert read_block(made).experts_format(3, 8, ()) == form.format
    method = "modelopt_fp4" if form.name == "modelopt" else form.name
    theirs: Any = get_quantization_config(method).from_config(copy.deepcopy(made))
    if form.name == "compressed-tensors":
        (experts_target,) = [t for t in theirs.target_scheme_map if "experts" in t]
        assert re.match(experts_target[3:], "model.llm.layers.3.mlp.experts.routed_experts")


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        (quark(INT8), "the experts' scheme of method quark is not known"),
        (quark(MX, **{"*mlp.experts*": INT8}), "scheme of method quark"),
        (compressed(Linear=INT4), "scheme of method compressed-tensors"),
        (compressed(Linear=BLOCK), "scheme of method compressed-tensors"),
        (compressed(**{"re:.*attn.*": NVFP4}), "scheme of method compressed-tensors"),
        (compressed(**{"re:.*experts.*w13.*": NVFP4, "re:.*experts.*w2.*": CHANNEL}),
         "scheme of method compressed-tensors"),
        (modelopt("FP8"), "scheme of method modelopt is not known; use .*NVFP4 by modelopt"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"},
         "quantization_config of method fp8 is not known; use a checkpoint in .*FP8 with a scale"),
        ({"quant_method": "mxfp4"}, "quantization_config of method mxfp4 is not known"),
        ({"bits": 4}, "quantization_config of method without a name is not known"),
        (modelopt("NVFP4", 32), "group_size in quantization_config is 32; NVFP4 has blocks of 16"),
        (quark({**MX, "group_size": 16}), "group_size .* is 16; MXFP4 has blocks of 32"),
        (compressed(Linear={**NVFP4, "group_size": 32}), "group_size .* is 32; NVFP4 .* of 16"),
        (compressed(Linear=NVFP4, **{"re:.*attn.*": {**BLOCK, "block_structure": [64, 64]}}),
         r"block_structure .* is \[64, 64\]; .* need \[128, 128\]"),
        ({**quark(MX), "exclude": "lm_head"}, "exclude in quantization_config is 'lm_head'; use"),
        ({**quark(MX), "exclude": ["re:("]}, "of method quark is malformed .*; restore the config"),
        ({**quark(MX), "layer_quant_config": [1]}, "of method quark is malformed"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
         "of method compressed-tensors is malformed"),
        ([4], r"quantization_config is \[4\]; it needs to be an object"),
    ],
)  # fmt: skip
def test_others_are_refused(block: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_block(block)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(dictionary or list, key) of everything in a block."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@pytest.mark.parametrize("key", LAYOUTS)
def test_whatever_stands_in_a_block_is_read_or_refused_in_a_sentence(key: str) -> None:
    made, _ = tiny_quant.blocks(LAYOUTS[key], ["a"], ["b"])
    for holder, where in list(places(made)):
        was = holder[where]
        for strange in (None, -1, 0.5, True, "x", "re:(", [], {}, [1], ["re:["], [None],
                        [{"a": 1}], {"a": 1}, {"weights": "x"}):  # fmt: skip
            holder[where] = strange
            try:
                read_block(made).experts_format(2, 8, ())
            except ConfigError as error:
                assert "\n" not in str(error)
        holder[where] = was


def test_a_damaged_file_of_modelopt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": ')
    monkeypatch.setattr(settings, "checkpoint_folder", lambda _: tmp_path)
    model = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=modelopt("NVFP4")))
    with pytest.raises(ConfigError, match=r"^file hf_quant_config\.json is damaged .*; down"):
        settings._quantisation(SimpleNamespace(model_config=model))


def test_two_blocks_must_agree() -> None:
    agree(modelopt("NVFP4"), {"quantization": modelopt("NVFP4")})
    with pytest.raises(ConfigError, match=r"config\.json says mxfp4 and hf_quant_config\.json says "
                       "nvfp4; remove the one"):  # fmt: skip
        agree(quark(MX), {"quantization": modelopt("NVFP4")})


KEPT = {
    "tensors": ["model.llm.layers.2.mlp.experts.w13_weight",
                "model.llm.layers.2.mlp.experts.w2_weight"],
    "the module": ["model.llm.layers.2.mlp.experts"],
    "as this model calls it": ["model.layers.2.mlp.experts"],
    "fused, in the other naming": ["model.language_model.layers.2.mlp.experts.gate_up_proj",
                                   "model.language_model.layers.2.mlp.experts.down_proj"],
    "the layer": ["model.llm.layers.2"],
    "a wildcard": ["*layers.2.mlp*"],
    "a pattern": ["re:.*layers[.]2[.].*experts"],
    "every expert": [f"model.layers.2.mlp.experts.{i}.{w}_proj" for i in range(8)
                     for w in ("gate", "up", "down")],
}  # fmt: skip


@pytest.mark.parametrize("how", KEPT)
def test_lists_of_what_is_kept(how: str) -> None:
    found = Quantisation("mxfp4", layout("mxfp4"), ("lm_head", "qkv_proj", *KEPT[how]))
    formats = [found.experts_format(layer, 8, ()) for layer in (1, 2, 12, 20, 22)]
    assert formats == ["mxfp4", "bf16", "mxfp4", "mxfp4", "mxfp4"]


def test_tensors_decide_over_lists() -> None:
    listed = Quantisation("mxfp4", layout("mxfp4"), ("model.llm.layers.3.mlp.experts",))
    names = {f"model.llm.layers.3.mlp.experts.{w}_weight_scale" for w in ("w13", "w2")}
    assert listed.experts_format(3, 8, names) == "mxfp4"
    assert listed.experts_format(2, 8, names) == "bf16"


@pytest.mark.parametrize(
    ("kept", "names"),
    [
        (["model.llm.layers.2.mlp.experts.w13_weight"], ()),
        (["model.llm.layers.2.mlp.experts.0.up_proj"], ()),
        ([], {"model.llm.layers.2.mlp.experts.w2_weight_scale"}),
    ],
)
def test_a_layer_quantised_in_part_is_refused(kept: list[str], names: Any) -> None:
    found = Quantisation("mxfp4", layout("mxfp4"), tuple(kept))
    with pytest.raises(ConfigError, match="experts of layer 2 are quantised in part"):
        found.experts_format(2, 8, names)


def test_an_unheard_of_method_is_refused() -> None:
    strange = SimpleNamespace(get_name=lambda: "fp8_of_tomorrow")
    with pytest.raises(ConfigError, match=r"fp8_of_tomorrow is not known .*NVFP4 by modelopt"):
        rounded_at_start(strange)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"moe": "fp8_per_channel"}, "fp8"),
        ({"moe": "fp8_per_tensor"}, "fp8"),
        ({"moe": "fp8_per_block"}, "fp8"),
        ({"linear": "fp8_per_tensor"}, "bf16"),
        ({"moe": "int8_per_channel_weight_only"}, None),
        ({"moe": "mxfp8"}, None),
        ({"targets": {"re:.*experts.*": "fp8_per_tensor"}}, None),
    ],
)
def test_rounding_at_start(settings: dict[str, Any], expected: str | None) -> None:
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    config = OnlineQuantizationConfig(QuantizationConfigArgs(**settings))
    if expected is None:
        with pytest.raises(ConfigError, match="quantisation method online is not known"):
            rounded_at_start(config)
    else:
        assert rounded_at_start(config) == Quantisation(expected)


@pytest.mark.parametrize("key", LAYOUTS)
def test_vllm_leaves_the_same_layers_plain_as_a_conversion_does(key: str, tmp_path: Path) -> None:
    """vLLM's own matching of names, under the names that its Inkling gives to its layers."""
    form = LAYOUTS[key]
    write_tiny(tmp_path, layers=12, dense_mlp_idx=2, mtp_depths=0)
    plan = make_plan(read_source(tmp_path), form.format, form.name, None)
    assert plan.layers == tuple(range(3, 12))
    method = "modelopt_fp4" if form.name == "modelopt" else form.name
    theirs: Any = get_quantization_config(method).from_config(
        copy.deepcopy(plan.config["quantization_config"])
    )
    theirs.packed_modules_mapping = {"qkvr": ["wq_du", "wk_dv", "wv_dv", "wr_du"]}
    theirs.apply_vllm_mapper(
        WeightsMapper(
            orig_to_new_substr={".w13_dn": ".gate_up_proj", ".w2_md": ".down_proj"},
            orig_to_new_prefix={
                "model.llm.layers.": "model.layers.",
                "model.llm.unembed": "lm_head",
            },
        )
    )

    def kept(name: str) -> bool:
        experts = name.endswith(".mlp.experts")
        if form.name == "modelopt":
            return bool(theirs.is_layer_excluded(name))
        if form.name == "quark":
            excluded = theirs.quant_config["exclude"]
            if experts:  # its Inkling asks for both tensors
                return {f"{name}.w13_weight", f"{name}.w2_weight"} <= set(excluded)
            return should_ignore_layer(name, excluded, theirs.packed_modules_mapping)
        # Its experts ask for the first of them.
        return (
            theirs.get_scheme_dict(torch.nn.Linear(1, 1), f"{name}.0.w1" if experts else name)
            is None
        )

    found = {layer: kept(f"model.layers.{layer}.mlp.experts") for layer in range(2, 12)}
    assert found == {layer: layer == 2 for layer in range(2, 12)}
    for layer in range(12):
        assert kept(f"model.layers.{layer}.attn.qkvr") and kept(f"model.layers.{layer}.attn.wo_ud")
    assert kept("model.layers.0.mlp.gate_up_proj") and kept("model.layers.1.mlp.down_proj")
    assert kept("lm_head")
