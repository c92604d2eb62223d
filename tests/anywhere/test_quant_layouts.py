"""Published forms of quantised checkpoints: names and shapes as the published tables have them,
values by worked examples, and what a writer writes read back."""

from __future__ import annotations

import math

import pytest
import torch

from inkling_portable.model import quant_layouts as q

B = "model.llm.layers.5.mlp.experts.w13_weight"
STEM = "model.llm.layers.5.mlp.experts.w13"

# E experts, R rows, C columns.
TABLE = {
    "nvfp4/modelopt": {
        B: ("U8", "E R C/2"),
        f"{B}.scale": ("F8_E4M3", "E R C/16"),
        f"{B}.scale2": ("F32", "E"),
        f"{B}.input_amax": ("BF16", "1"),
        f"{B}.original_shape": ("I64", "3"),
    },
    "nvfp4/compressed-tensors": {
        f"{B}.weight_packed": ("U8", "E R C/2"),
        f"{B}.weight_scale": ("F8_E4M3", "E R C/16"),
        f"{B}.weight_global_scale": ("F32", "E"),
        f"{B}.input_global_scale": ("F32", "E"),
    },
    "fp8/compressed-tensors": {B: ("F8_E4M3", "E R C"), f"{STEM}_weight_scale": ("F32", "E R 1")},
    "mxfp4/quark": {B: ("U8", "E R C/2"), f"{STEM}_weight_scale": ("U8", "E*R C/32")},
}


@pytest.mark.parametrize("key", q.LAYOUTS)
def test_names_and_shapes_of_the_published_table(key: str) -> None:
    found = q.parts(q.LAYOUTS[key], B, (4, 6, 64))
    sizes = {"E": 4, "R": 6, "C": 64}

    def evaluated(text: str) -> tuple[int, ...]:
        return tuple(int(eval(term, {}, sizes)) for term in text.split())

    wanted = {name: (dtype, evaluated(shape)) for name, (dtype, shape) in TABLE[key].items()}
    assert {part.name: (part.dtype, part.shape) for part in found.values()} == wanted


def test_both_spellings_are_found_and_other_tensors_are_not() -> None:
    form = q.LAYOUTS["nvfp4/compressed-tensors"]
    flat = {f"{STEM}_weight_packed", f"{STEM}_weight_scale", f"{STEM}_weight_global_scale"}
    names = q.find(form, B, flat)
    assert names is not None
    assert set(names.values()) == flat  # the activation's range is optional
    assert q.find(form, B, {B}) is None
    assert q.find(form, B, {f"{B}.weight_scale"}) == {
        "codes": f"{B}.weight_packed", "scale": f"{B}.weight_scale",
        "global": f"{B}.weight_global_scale",
    }  # fmt: skip
    nested = q.find(q.LAYOUTS["fp8/compressed-tensors"], B, {f"{B}.weight", f"{B}.weight_scale"})
    assert nested == {"codes": f"{B}.weight", "scale": f"{B}.weight_scale"}


# Bytes, scale bytes and global scale of the specification's worked examples, and their values.
FP4 = bytes.fromhex("5a10f73c")
WORKED = {
    "nvfp4/modelopt": (FP4, 0x6C, 1 / 1024,
        [-0.09375, 0.28125, 0, 0.046875, 0.5625, -0.5625, -0.1875, 0.140625]),
    "nvfp4/compressed-tensors": (FP4, 0x6C, 1024.0,
        [-0.09375, 0.28125, 0, 0.046875, 0.5625, -0.5625, -0.1875, 0.140625]),
    "mxfp4/quark": (FP4, 0x7A, None,
        [-0.03125, 0.09375, 0, 0.015625, 0.1875, -0.1875, -0.0625, 0.046875]),
    "fp8/compressed-tensors": (bytes.fromhex("38c47e01"), None, None,
        [0.015625, -0.046875, 7.0, 2.0**-15]),
}  # fmt: skip


@pytest.mark.parametrize("key", q.LAYOUTS)
def test_worked_examples(key: str) -> None:
    form = q.LAYOUTS[key]
    codes, scale, gain, values = WORKED[key]
    row = torch.tensor(list(codes), dtype=torch.uint8)
    if form.block:
        row = torch.nn.functional.pad(row, (0, form.block // 2 - len(row)))
    parts = {q.CODES: row.expand(2, 4, -1).contiguous()}
    if form.format == "fp8":
        parts[q.SCALE] = torch.full((2, 4, 1), 0.015625)
    else:
        shape = (8, 1) if form.flat_scale else (2, 4, 1)
        parts[q.SCALE] = torch.full(shape, scale, dtype=torch.uint8)
    if gain is not None:
        parts[q.GLOBAL] = torch.full((2,), gain)
    found = q.decode(form, parts)
    assert found.shape[:2] == (2, 4)
    assert found[1, 3, : len(values)].tolist() == values


def test_global_scales_of_gate_and_up_alternate() -> None:
    form = q.LAYOUTS["nvfp4/compressed-tensors"]
    codes = torch.full((1, 4, 8), 0x22, dtype=torch.uint8)  # ones
    parts = {q.CODES: codes, q.SCALE: torch.full((1, 4, 1), 0x38, dtype=torch.uint8),
             q.GLOBAL: torch.tensor([[2.0, 8.0]])}  # fmt: skip
    assert q.decode(form, parts)[0, :, 0].tolist() == [0.5, 0.125, 0.5, 0.125]


@pytest.mark.parametrize("key", q.LAYOUTS)
def test_written_tensors_are_those_of_the_table(key: str) -> None:
    form = q.LAYOUTS[key]
    weight = torch.randn((3, 4, 64), generator=torch.Generator().manual_seed(1))
    written = q.encode(form, weight)
    wanted = q.parts(form, B, (3, 4, 64))
    assert {role: wanted[role].shape for role in written} == {
        role: tuple(tensor.shape) for role, tensor in written.items()
    }
    spelled = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    assert {role: wanted[role].dtype for role in written} == {
        role: spelled[tensor.dtype] for role, tensor in written.items()
    }
    error = q.decode(form, written) - weight
    # 4 bits: half a step is at most a sixth of the block's largest number; 8 bits: 1/16 of each.
    bound = 1 / 16 if form.format == "fp8" else 1 / 6
    assert error.abs().max() <= bound * 1.07 * weight.abs().max()
    # Experts one by one, put one after another, are the same.
    pieces = [q.encode(form, weight[i : i + 1]) for i in range(3)]
    assert all(torch.equal(torch.cat([p[role] for p in pieces]).view(torch.uint8),
                           written[role].view(torch.uint8)) for role in written)  # fmt: skip


@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (130, 96), (1, 300)])
@pytest.mark.parametrize("tiles", [True, False])
def test_linear_layers(rows: int, columns: int, tiles: bool) -> None:
    from inkling_portable.formats import dequantize_fp8

    weight = torch.randn((rows, columns), generator=torch.Generator().manual_seed(2))
    weight[0] = 0
    parts = q.encode_linear(weight, tiles=tiles)
    blocks = (math.ceil(rows / 128), math.ceil(columns / 128))
    assert parts[q.SCALE].shape == (blocks if tiles else (rows, 1))
    found = dequantize_fp8(parts[q.CODES], parts[q.SCALE], block=q.TILE if tiles else None)
    assert (found - weight).abs().max() <= weight.abs().max() / 16
    if tiles:
        # The last tile's scale is of its own rows and columns only.
        last = weight[128 * (blocks[0] - 1) :, 128 * (blocks[1] - 1) :].abs().max() / 448
        assert parts[q.SCALE][-1, -1] == (last if last else 1)


def test_columns_that_blocks_do_not_divide() -> None:
    with pytest.raises(ValueError, match=rf"tensor {B} has 48 columns, and blocks of 32 must"):
        q.parts(q.LAYOUTS["mxfp4/quark"], B, (2, 4, 48))
    with pytest.raises(ValueError, match="no checkpoint layout is known for mxfp4 as modelopt; use "
                       "one of nvfp4 as modelopt"):  # fmt: skip
        q.layout("mxfp4", "modelopt")


def test_lists_of_what_is_kept() -> None:
    sparse = "model.llm.layers.2.mlp.experts."
    kept = ["model.llm.layers.0.mlp.global_scale", "model.llm.layers.0.attn.wq_du.weight",
            f"{sparse}w13_weight", f"{sparse}w2_weight", "model.mtp.layers.0.input_proj.weight",
            "model.visual.final_norm.weight"]  # fmt: skip
    block = q.config_block(q.LAYOUTS["nvfp4/modelopt"], kept, [B])
    assert block["exclude_modules"] == [
        "model.llm.layers.0.mlp", "model.llm.layers.0.attn.wq_du", "model.llm.layers.2.mlp.experts",
        "model.visual.final_norm",
    ]  # fmt: skip
    block = q.config_block(q.LAYOUTS["mxfp4/quark"], kept, [B])
    assert block["exclude"][2:4] == [f"{sparse}w13_weight", f"{sparse}w2_weight"]
    linear = "model.llm.layers.1.attn.wo_ud.weight"
    block = q.config_block(q.LAYOUTS["nvfp4/compressed-tensors"], kept, [B, linear], "block")
    assert block["config_groups"]["group_1"]["targets"] == ["re:.*attn[.](wo_ud)"]
    assert linear.removesuffix(".weight") not in block["ignore"]
