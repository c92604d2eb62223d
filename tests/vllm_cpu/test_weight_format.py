"""The experts' number format, from vLLM's own quantisation configs; no engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.quantization import get_quantization_config

from inkling_portable.model.config import ConfigError
from inkling_portable.model.weight_format import weight_format

MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
INT8 = {"dtype": "int8", "qscheme": "per_tensor"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def quark(whole: dict[str, Any], **layers: dict[str, Any]) -> dict[str, Any]:
    return {
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
    return {"format": "x", "ignore": [], "config_groups": groups}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16,
            "kv_cache_quant_algo": None, "exclude_modules": []}  # fmt: skip


def build(method: str, config: dict[str, Any]) -> Any:
    return get_quantization_config(method).from_config(config)


def test_no_quantisation() -> None:
    assert weight_format(None) == "bf16"


@pytest.mark.parametrize(
    ("method", "config", "expected"),
    [
        ("modelopt", modelopt("FP8"), "fp8"),
        ("modelopt_fp4", modelopt("NVFP4"), "nvfp4"),
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
        ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ("mxfp4", {"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_formats_of_vllm_configs(method: str, config: dict[str, Any], expected: str) -> None:
    assert weight_format(build(method, config)) == expected


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("quark", quark(INT8)),
        ("quark", quark(MX, **{"*mlp.experts*": INT8})),
        ("compressed-tensors", compressed(Linear=INT4)),
        ("compressed-tensors", compressed(Linear=BLOCK)),
        ("compressed-tensors", compressed(**{"re:.*attn.*": NVFP4})),
        ("modelopt_mxfp8", modelopt("MXFP8")),
        ("experts_int8", {}),
        ("auto_gptq", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}),
    ],
)
def test_others_are_refused(method: str, config: dict[str, Any]) -> None:
    sentence = rf"quantisation method {method} is not known; .*: modelopt, modelopt_fp4, quark"
    with pytest.raises(ConfigError, match=sentence):
        weight_format(build(method, config))


def test_an_unheard_of_method_is_refused() -> None:
    strange = SimpleNamespace(get_name=lambda: "fp8_of_tomorrow")
    with pytest.raises(ConfigError, match=r"fp8_of_tomorrow is not known; use .*modelopt_fp4"):
        weight_format(strange)


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
            weight_format(config)
    else:
        assert weight_format(config) == expected
