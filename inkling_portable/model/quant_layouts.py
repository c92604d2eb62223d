"""How quantised checkpoints spell Inkling's weights: names, shapes, values and config blocks.

One `Layout` per published form. Readers ask `find` which tensors stand for a weight; writers ask
`parts` what to store, `encode` for its values and `config_block` for the block of config.json.
Names and shapes are plain data, so planning needs no torch.

A routed weight is called by the name that it has in a BF16 checkpoint, "….mlp.experts.w13_weight"
[E, 2I, H] or "….w2_weight" [E, H, I]; a linear one by "….attn.wq_du.weight" [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

CODES, SCALE, GLOBAL, INPUT, ORIGINAL = "codes", "scale", "global", "input", "original"
"""Roles of the tensors that stand for one weight.

CODES  the numbers, packed two to a byte in 4-bit formats
SCALE  one number per block of columns, or per row
GLOBAL one number per expert (NVFP4); some files have one each for gate and up rows
INPUT  range of the activations, which weight-only kernels do not read; optional
ORIGINAL the shape before packing, for information
"""

EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
LINEARS = ("attn.wq_du.weight", "attn.wk_dv.weight", "attn.wv_dv.weight", "attn.wo_ud.weight")
"""Linear layers that some releases store in FP8, by their names inside a decoder layer."""

NVFP4_RANGE = 6.0 * 448.0
"""Largest E2M1 number times largest E4M3 number: an amax divided by it is a global scale."""


@dataclass(frozen=True)
class Layout:
    """One published form of quantised experts.

    `spellings` lists name patterns by role; "{stem}" is "….experts.w13" or "….experts.w2". Writers
    use the first. `block`: columns that share a scale, 0 for a scale per row.
    """

    name: str
    format: str
    block: int
    spellings: tuple[Mapping[str, str], ...]
    flat_scale: bool = False
    """Scales of all experts lie under one another: [E * rows, blocks]."""
    reciprocal: bool = False
    """Global scales divide instead of multiplying."""

    @property
    def key(self) -> str:
        return f"{self.format}/{self.name}"


_CT = "compressed-tensors"
LAYOUTS: Mapping[str, Layout] = {
    layout.key: layout
    for layout in (
        Layout("modelopt", "nvfp4", 16, ({
            CODES: "{stem}_weight", SCALE: "{stem}_weight.scale", GLOBAL: "{stem}_weight.scale2",
            INPUT: "{stem}_weight.input_amax", ORIGINAL: "{stem}_weight.original_shape",
        },)),
        Layout(_CT, "nvfp4", 16, ({
            CODES: "{stem}_weight.weight_packed", SCALE: "{stem}_weight.weight_scale",
            GLOBAL: "{stem}_weight.weight_global_scale",
            INPUT: "{stem}_weight.input_global_scale",
        }, {
            CODES: "{stem}_weight_packed", SCALE: "{stem}_weight_scale",
            GLOBAL: "{stem}_weight_global_scale", INPUT: "{stem}_input_global_scale",
        }), reciprocal=True),
        Layout(_CT, "fp8", 0, (
            {CODES: "{stem}_weight", SCALE: "{stem}_weight_scale"},
            {CODES: "{stem}_weight.weight", SCALE: "{stem}_weight.weight_scale"},
        )),
        Layout("quark", "mxfp4", 32, ({CODES: "{stem}_weight", SCALE: "{stem}_weight_scale"},),
               flat_scale=True),
    )
}  # fmt: skip
"""By "format/layout", such as "nvfp4/modelopt"."""


def layout(format: str, name: str | None = None) -> Layout:
    """The layout called `name` of a format, by default its first; raises ValueError with a list."""
    for found in LAYOUTS.values():
        if found.format == format and name in (None, found.name):
            return found
    known = ", ".join(f"{have.format} as {have.name}" for have in LAYOUTS.values())
    wanted = format if name is None else f"{format} as {name}"
    raise ValueError(f"no checkpoint layout is known for {wanted}; use one of {known}")


class Part(NamedTuple):
    """One stored tensor of a weight; `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: Shape


def parts(form: Layout, weight: str, shape: Shape) -> dict[str, Part]:
    """What a writer stores for a routed weight [E, rows, columns], by role, INPUT included."""
    experts, rows, columns = shape
    if form.block and columns % form.block:
        raise ValueError(
            f"tensor {weight} has {columns} columns, and blocks of {form.block} must divide them; "
            f"keep it in bf16 or choose another format"
        )
    blocks = columns // form.block if form.block else 1
    scale = (experts * rows, blocks) if form.flat_scale else (experts, rows, blocks)
    packed = form.format in ("nvfp4", "mxfp4")
    reciprocal_input = form.name == _CT
    found = {
        CODES: ("U8" if packed else "F8_E4M3", (experts, rows, columns // (2 if packed else 1))),
        SCALE: ({"nvfp4": "F8_E4M3", "mxfp4": "U8", "fp8": "F32"}[form.format], scale),
        GLOBAL: ("F32", (experts,)),
        INPUT: ("F32", (experts,)) if reciprocal_input else ("BF16", (1,)),
        ORIGINAL: ("I64", (3,)),
    }
    return {
        role: Part(pattern.format(stem=_stem(weight)), *found[role])
        for role, pattern in form.spellings[0].items()
    }


def find(form: Layout, weight: str, names: Collection[str]) -> dict[str, str] | None:
    """Names by role of the tensors that stand for `weight`; None when it is not quantised.

    A weight counts as quantised when its scale is there, under any spelling.
    """
    for spelling in form.spellings:
        found = {role: pattern.format(stem=_stem(weight)) for role, pattern in spelling.items()}
        if found[SCALE] in names:
            return {role: name for role, name in found.items()
                    if name in names or role in (CODES, GLOBAL)}  # fmt: skip
    return None


def _stem(weight: str) -> str:
    return weight.removesuffix("_weight")


# --- values -------------------------------------------------------------------------------------


def encode(form: Layout, weight: Tensor) -> dict[str, Tensor]:
    """Values of a routed weight [e, rows, columns], or of some of its experts, by role.

    CODES, SCALE and GLOBAL have the dtypes and shapes of `parts` for e experts, so that pieces can
    be put one after another along the first dimension.
    """
    from inkling_portable import formats

    if form.format == "nvfp4":
        codes, scale, gain = formats.quantize_nvfp4(weight)
        return {CODES: codes, SCALE: scale, GLOBAL: 1 / gain if form.reciprocal else gain}
    if form.format == "mxfp4":
        codes, scale = formats.quantize_mxfp4(weight)
        return {CODES: codes, SCALE: scale.flatten(0, 1)}
    codes, scale = formats.quantize_fp8_channel(weight)
    return {CODES: codes, SCALE: scale}


def decode(
    form: Layout, found: Mapping[str, Tensor], dtype: Any = None, name: str = "weight"
) -> Tensor:
    """The weight [e, rows, columns] in `dtype` (by default fp32) from its tensors by role.

    GLOBAL may have one number per expert, [e] or [e, 1], or one for gate and one for up rows,
    [e, 2], which alternate. Raises ValueError, starting with `name`, for values that cannot be.
    """
    import torch

    from inkling_portable import formats

    dtype = dtype or torch.float32
    codes, scale = found[CODES], found[SCALE]
    if form.format == "nvfp4":
        gain = found[GLOBAL]
        if gain.dim() == 2 and gain.shape[1] == 2:
            gain = formats.row_global_scale(gain, codes.shape[-2], interleaved=True)
        return formats.dequantize_nvfp4(
            codes, scale, gain, dtype, reciprocal=form.reciprocal, name=name
        )
    if form.format == "mxfp4":
        return formats.dequantize_mxfp4(codes, scale, dtype, name=name)
    return formats.dequantize_fp8(codes, scale, dtype, name=name)


TILE = (128, 128)
"""Rows and columns that share a scale in linear layers with block scales."""


def encode_linear(weight: Tensor, *, tiles: bool) -> dict[str, Tensor]:
    """CODES and SCALE of a linear weight [out, in] in FP8.

    tiles: SCALE [ceil(out / 128), ceil(in / 128)] instead of [out, 1]; both are float32.
    """
    import torch
    from torch.nn.functional import pad

    from inkling_portable import formats

    if not tiles:
        codes, scale = formats.quantize_fp8_channel(weight)
        return {CODES: codes, SCALE: scale}
    rows, columns = weight.shape
    whole = pad(weight.float(), (0, -columns % TILE[1], 0, -rows % TILE[0]))
    blocks = whole.unflatten(1, (-1, TILE[1])).unflatten(0, (-1, TILE[0]))
    amax = blocks.abs().amax((1, 3)) / 448.0
    scale = torch.where(amax > 0, amax, torch.ones_like(amax))
    codes = formats.encode_e4m3(blocks / scale[:, None, :, None])
    return {CODES: codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), SCALE: scale}


def linear_scale(weight: str) -> str:
    """Name of the scale of a linear layer's weight."""
    return f"{weight}_scale"


# --- blocks of config.json ------------------------------------------------------------------------


def config_block(
    form: Layout, kept: Iterable[str], quantised: Iterable[str], linears: str | None = None
) -> dict[str, Any]:
    """The `quantization_config` that makes vLLM and this package load such a checkpoint.

    Args:
        form: layout of the quantised experts.
        kept: names of the tensors that stay as they were; names of MTP tensors may be among them,
            and stay out of the list, as in the released files.
        quantised: names of the quantised weights, routed and linear.
        linears: "block" or "channel" for linear layers in FP8, None for none.
    """
    return _BLOCKS[form.key](
        [name for name in kept if not name.startswith("model.mtp.")], list(quantised), linears
    )


def modules(names: Iterable[str]) -> list[str]:
    """Names of the modules that own tensors, in order, each once."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _modelopt(kept: list[str], quantised: list[str], linears: str | None) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
            "kv_cache_quant_algo": None, "exclude_modules": modules(kept)}  # fmt: skip


def _quark(kept: list[str], quantised: list[str], linears: str | None) -> dict[str, Any]:
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0",
              "is_dynamic": False, "ch_axis": -1, "round_method": "half_even",
              "scale_type": "float", "scale_calculation_mode": "even", "symmetric": None,
              "observer_cls": "PerBlockMXObserver"}  # fmt: skip
    inputs = {**weight, "is_dynamic": True}
    return {
        "quant_method": "quark",
        # Experts by tensor, everything else by module.
        "exclude": list(dict.fromkeys(
            name if name.endswith(EXPERT_WEIGHTS) else name.rpartition(".")[0] for name in kept
        )),
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None,
                                "bias": None, "target_device": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "algo_config": None,
        "softmax_quant_spec": None,
        "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
                   "weight_format": "real_quantized", "weight_merge_groups": None},
    }  # fmt: skip


def _ct_nvfp4(kept: list[str], quantised: list[str], linears: str | None) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
               "symmetric": True, "dynamic": False}  # fmt: skip
    experts = {
        "targets": ["re:.*mlp[.]experts.*"],
        "format": "nvfp4-pack-quantized",
        "weights": weights,
        "input_activations": {**weights, "dynamic": "local"},
    }
    return _compressed("nvfp4-pack-quantized", experts, kept, quantised, linears)


def _ct_fp8(kept: list[str], quantised: list[str], linears: str | None) -> dict[str, Any]:
    experts = {"targets": ["re:.*mlp[.]experts.*"], "format": "float-quantized",
               **_ct_linear("channel")}  # fmt: skip
    return _compressed("float-quantized", experts, kept, quantised, linears)


def _ct_linear(kind: str) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": kind,
                               "symmetric": True, "dynamic": False}  # fmt: skip
    inputs: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "token",
                              "symmetric": True, "dynamic": True}  # fmt: skip
    if kind == "block":
        weights["block_structure"] = list(TILE)
        inputs |= {"strategy": "group", "group_size": TILE[1]}
    return {"weights": weights, "input_activations": inputs}


def _compressed(
    kind: str, experts: dict[str, Any], kept: list[str], quantised: list[str], linears: str | None
) -> dict[str, Any]:
    groups = {"group_0": experts}
    if linears is not None:
        names = "|".join(dict.fromkeys(n.split(".")[-2] for n in quantised
                                       if n.endswith(".weight")))  # fmt: skip
        groups["group_1"] = {"targets": [f"re:.*attn[.]({names})"], "format": "float-quantized",
                             **_ct_linear(linears)}  # fmt: skip
    return {
        "quant_method": _CT,
        "format": kind if linears is None or kind == "float-quantized" else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": modules(kept),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


_BLOCKS: Mapping[str, Callable[[list[str], list[str], str | None], dict[str, Any]]] = {
    "nvfp4/modelopt": _modelopt,
    "nvfp4/compressed-tensors": _ct_nvfp4,
    "fp8/compressed-tensors": _ct_fp8,
    "mxfp4/quark": _quark,
}
