"""The number format of the routed experts, read from what the engine's quantisation config says.

A table of known methods, so that an unknown one is refused: a guess would choose kernels that read
the weights wrongly. Nothing here imports the engine; configs are read by their attributes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from inkling_portable.model.config import ConfigError

NAMINGS = (
    "model.layers.5.mlp.experts.routed_experts",
    "model.layers.5.mlp.experts",
    "model.llm.layers.5.mlp.experts.w13_weight",
    "model.language_model.layers.5.mlp.experts.gate_up_proj",
)
"""The routed experts of one layer as this model and both kinds of checkpoint call them."""


def weight_format(quant: Any) -> str:
    """Name in Facts ("bf16", "fp8", "nvfp4" or "mxfp4") of the routed experts' number format.

    quant: the engine's quantisation config, or None for none. Raises ConfigError for a method or a
    scheme that is not known.
    """
    if quant is None:
        return "bf16"
    method = str(quant.get_name()).lower()
    read = METHODS.get(method)
    found = read(quant) if callable(read) else read
    if found is None:
        what = "the experts' scheme of quantisation method" if read else "quantisation method"
        raise ConfigError(
            f"{what} {method} is not known; use a checkpoint in one of the known formats: {KNOWN}"
        )
    return found


def _online(quant: Any) -> str | None:
    """The engine rounds BF16 weights itself; experts that its settings leave out stay BF16."""
    if getattr(quant.args, "targets", None) is not None:
        return None
    spec = quant.args.moe
    key = None if spec is None else spec.weight
    if key is None:
        return "bf16"
    return "fp8" if str(spec).startswith("fp8_") else None


def _quark(quant: Any) -> str | None:
    config = quant.quant_config
    layers = config.get("layer_quant_config") or {}
    own = [scheme for target, scheme in layers.items() if _means_experts(target)]
    for scheme in own or [config.get("global_quant_config")]:
        weight = (scheme or {}).get("weight")
        wanted = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
        if not isinstance(weight, Mapping) or any(weight.get(k) != v for k, v in wanted.items()):
            return None
    return "mxfp4"


def _compressed_tensors(quant: Any) -> str | None:
    schemes: Mapping[str, Any] = quant.target_scheme_map
    own = [scheme for target, scheme in schemes.items() if _means_experts(target)]
    general = [schemes[name] for name in ("RoutedExperts", "FusedMoE", "Linear") if name in schemes]
    found = {_compressed_scheme(scheme) for scheme in own or general[:1]}
    return found.pop() if len(found) == 1 else None


def _compressed_scheme(scheme: Mapping[str, Any] | None) -> str | None:
    weights = (scheme or {}).get("weights")
    if weights is None or _word(weights.type) != "float":
        return None
    strategy = _word(weights.strategy)
    if (weights.num_bits, strategy, weights.group_size) == (4, "tensor_group", 16):
        return "nvfp4"
    return "fp8" if (weights.num_bits, strategy) == (8, "channel") else None


def _word(value: Any) -> str:
    """The text of an enumeration's member, or of a text."""
    return str(getattr(value, "value", value))


def _means_experts(target: str) -> bool:
    """Whether a layer's name, `re:` or `*` pattern is about the routed experts."""
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in NAMINGS)
    if any(fnmatchcase(name, target) for name in NAMINGS):
        return True
    return "experts" in target and "shared" not in target


METHODS: Mapping[str, str | Callable[[Any], str | None]] = {
    "modelopt": "fp8",
    "modelopt_fp4": "nvfp4",
    "quark": _quark,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": "mxfp4",
    "fp8": "fp8",
    "online": _online,
}
"""By the name that the engine's config object reports, not by what a user typed."""

KNOWN = (
    "modelopt, modelopt_fp4, quark in MXFP4, compressed-tensors in NVFP4 or in FP8 with a scale "
    "per channel, mxfp4, fp8 and online FP8"
)
