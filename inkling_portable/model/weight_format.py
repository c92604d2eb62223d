"""The number format of the weights, read from a checkpoint's `quantization_config`.

A table of known methods, so that an unknown one is refused: a guess would choose kernels that read
the weights wrongly. Which tensors are quantised is then seen in the files; the lists of what is
kept answer where there are no files to look at. Nothing here imports the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from inkling_portable.model.config import ConfigError
from inkling_portable.model.quant_layouts import EXPERT_WEIGHTS, Layout, find, layout

KNOWN = (
    "NVFP4 by modelopt or compressed-tensors, MXFP4 by quark, FP8 with a scale per channel by "
    "compressed-tensors, and BF16"
)

NAMINGS = (
    "model.layers.{}.mlp.experts.routed_experts",
    "model.llm.layers.{}.mlp.experts.w13_weight",
    "model.llm.layers.{}.mlp.experts.w2_weight",
    "model.language_model.layers.{}.mlp.experts.gate_up_proj",
    "model.language_model.layers.{}.mlp.experts.down_proj",
)
"""The routed experts of a layer as this model and both kinds of checkpoint call them."""
_GATE_UP, _DOWN = (NAMINGS[1], NAMINGS[3]), (NAMINGS[2], NAMINGS[4])
_ONE_EXPERT = re.compile(r"\blayers\.(\d+)\.mlp\.experts\.(\d+)(\.|$)")


@dataclass(frozen=True)
class Quantisation:
    """What the block of a checkpoint says. Without a block: BF16, or rounded by the engine."""

    format: str = "bf16"
    """Of the routed experts: "bf16", "fp8", "nvfp4" or "mxfp4"."""
    layout: Layout | None = None
    """How the tensors are spelled; None for weights that are stored in BF16."""
    kept: tuple[str, ...] = ()
    """Names and patterns of what is not quantised."""

    def experts_format(self, layer: int, experts: int, names: Collection[str]) -> str:
        """The format of one layer's routed experts.

        names: all tensors of the checkpoint, which decide; empty where they are not known yet.
        Raises ConfigError for a layer of which only a part is quantised.
        """
        if self.layout is None:
            return self.format
        if names:
            where = f"model.llm.layers.{layer}.mlp.experts."
            quantised = [find(self.layout, where + w, names) is not None for w in EXPERT_WEIGHTS]
            mixed = any(quantised) and not all(quantised)
        else:
            # Each weight in each of its names, and all of it where the module is named.
            whole = self._keeps(NAMINGS[0].format(layer))
            halves = [whole or any(self._keeps(n.format(layer)) for n in half)
                      for half in (_GATE_UP, _DOWN)]  # fmt: skip
            single = {int(m[2]) for name in self.kept if (m := _ONE_EXPERT.search(name))
                      and int(m[1]) == layer}  # fmt: skip
            quantised = [not kept and len(single) < experts for kept in halves]
            mixed = len(set(quantised)) > 1 or (all(quantised) and bool(single))
        if mixed:
            raise ConfigError(
                f"the routed experts of layer {layer} are quantised in part, and a layer is served "
                "whole: quantise or keep all of its experts and both of their weights"
            )
        return self.format if all(quantised) else "bf16"

    def _keeps(self, name: str) -> bool:
        return any(_means(pattern, name) for pattern in self.kept)


def _means(pattern: str, name: str) -> bool:
    """Whether a name, `re:` or `*` pattern of a list is about `name`, itself or as a part of it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def read_block(raw: Mapping[str, Any] | None) -> Quantisation:
    """What a `quantization_config` says. Raises ConfigError for one that is not known."""
    if raw is None:
        return Quantisation()
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"quantization_config is {raw!r}; it needs to be an object, as the release has it"
        )
    method = str(raw.get("quant_method") or _unnamed(raw)).lower().replace("_", "-")
    read = BLOCKS.get(method)
    try:
        found = None if read is None else read(raw)
    except (AttributeError, TypeError, re.error) as error:  # a part of another kind, anywhere in it
        raise ConfigError(
            f"quantization_config of method {method} is malformed ({error}); restore the config "
            "of the release"
        ) from error
    if found is None:
        what = "quantization_config" if read is None else "the experts' scheme"
        raise ConfigError(
            f"{what} of method {method or 'without a name'} is not known; use a checkpoint in one "
            f"of the known formats: {KNOWN}"
        )
    return found


def agree(block: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse a config.json whose block and a hf_quant_config.json name different formats."""
    ours, theirs = read_block(block), read_block(other)
    if (ours.format, ours.layout) != (theirs.format, theirs.layout):
        raise ConfigError(
            f"quantization_config in config.json says {ours.format} and hf_quant_config.json says "
            f"{theirs.format}; remove the one that does not describe the tensors"
        )


def _unnamed(raw: Mapping[str, Any]) -> str:
    """ModelOpt's own file has neither a method nor, in Inkling's case, a producer."""
    inner = raw.get("quantization")
    return "modelopt" if isinstance(inner, Mapping) and "quant_algo" in inner else ""


def _modelopt(raw: Mapping[str, Any]) -> Quantisation | None:
    inner = raw.get("quantization", raw)
    if not isinstance(inner, Mapping):
        return None
    algorithm, size = str(inner.get("quant_algo", "")).upper(), inner.get("group_size")
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        return None
    _check_block("NVFP4", size, 16)
    kept = inner.get("exclude_modules") or inner.get("ignore") or ()
    return Quantisation("nvfp4", layout("nvfp4", "modelopt"), _names(kept, "exclude_modules"))


def _quark(raw: Mapping[str, Any]) -> Quantisation | None:
    layers = raw.get("layer_quant_config") or {}
    own = [scheme for target, scheme in layers.items() if _means_experts(target)]
    for scheme in own or [raw.get("global_quant_config")]:
        weight = (scheme or {}).get("weight")
        wanted = {"dtype": "fp4", "qscheme": "per_group", "scale_format": "e8m0"}
        if not isinstance(weight, Mapping) or any(weight.get(k) != v for k, v in wanted.items()):
            return None
        _check_block("MXFP4", weight.get("group_size"), 32)
    return Quantisation(
        "mxfp4", layout("mxfp4", "quark"), _names(raw.get("exclude") or (), "exclude")
    )


def _compressed_tensors(raw: Mapping[str, Any]) -> Quantisation | None:
    by_target = {
        target: group.get("weights")
        for group in (raw.get("config_groups") or {}).values()
        for target in group.get("targets") or ()
    }
    own = [weights for target, weights in by_target.items() if _means_experts(target)]
    general = [by_target[name] for name in ("RoutedExperts", "FusedMoE", "Linear")
               if name in by_target]  # fmt: skip
    found = {_compressed_scheme(weights) for weights in own or general[:1]}
    if len(found) != 1 or (format := found.pop()) is None:
        return None
    _check_tiles(by_target.values())
    kept = _names(raw.get("ignore") or (), "ignore")
    return Quantisation(format, layout(format, "compressed-tensors"), kept)


def _compressed_scheme(weights: Mapping[str, Any] | None) -> str | None:
    if weights is None or weights.get("type") != "float":
        return None
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if (bits, strategy) == (4, "tensor_group"):
        _check_block("NVFP4", weights.get("group_size"), 16)
        return "nvfp4"
    return "fp8" if (bits, strategy) == (8, "channel") else None


def _check_tiles(schemes: Collection[Mapping[str, Any] | None]) -> None:
    for weights in schemes:
        shape = (weights or {}).get("block_structure")
        if shape is not None and list(shape) != [128, 128]:
            raise ConfigError(
                f"block_structure in quantization_config is {shape!r}; linear layers with block "
                "scales need [128, 128]"
            )


def _check_block(format: str, found: Any, wanted: int) -> None:
    if found != wanted:
        raise ConfigError(
            f"group_size in quantization_config is {found!r}; {format} has blocks of {wanted}, so "
            f"quantise again with {wanted}"
        )


def _names(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{key} in quantization_config is {value!r}; use a list of names")
    for name in value:
        if name.startswith("re:"):
            re.compile(name[3:])  # what is no pattern is found here, not when a layer is built
    return tuple(value)


def _means_experts(target: str) -> bool:
    """Whether a layer's name, `re:` or `*` pattern is about the routed experts."""
    if target.startswith("re:") or "*" in target:
        return any(_means(target, name.format(5)) for name in NAMINGS)
    return "experts" in target and "shared" not in target


BLOCKS: Mapping[str, Callable[[Mapping[str, Any]], Quantisation | None]] = {
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "quark": _quark,
    "compressed-tensors": _compressed_tensors,
}


# --- rounding by the engine while it loads ------------------------------------------------------


def rounded_at_start(quant: Any) -> Quantisation:
    """What the engine makes of BF16 weights by its own settings; `quant` its config, or None."""
    if quant is None:
        return Quantisation()
    method = str(quant.get_name()).lower()
    found = "fp8" if method == "fp8" else _online(quant) if method == "online" else None
    if found is None:
        raise ConfigError(
            f"rounding at start by quantisation method {method} is not known for the routed "
            f"experts; ask for online FP8, or use a checkpoint in one of the known formats: {KNOWN}"
        )
    return Quantisation(found)


def _online(quant: Any) -> str | None:
    """Experts that the engine's settings leave out stay BF16."""
    if getattr(quant.args, "targets", None) is not None:
        return None
    spec = quant.args.moe
    key = None if spec is None else spec.weight
    if key is None:
        return "bf16"
    return "fp8" if str(spec).startswith("fp8_") else None
