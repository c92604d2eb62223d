"""`inkling-portable convert`: what it writes, held to published tables and to safetensors."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from inkling_portable.commands import convert as command
from inkling_portable.commands import tiny
from inkling_portable.commands.convert import convert
from inkling_portable.commands.released_configs import released
from inkling_portable.commands.tiny_tensors import mtp_specs, tensor_specs
from inkling_portable.conversion import blocks
from inkling_portable.conversion.plan import make_plan
from inkling_portable.conversion.source import ConvertError, read_source
from inkling_portable.model import quant_layouts as q
from inkling_portable.model.config import parse
from inkling_portable.model.loading import read_headers
from inkling_portable.model.quant_layouts import LAYOUTS, config_block

STACKS = [f"model.llm.layers.{layer}.mlp.experts.{kind}_weight"
          for layer in (2, 3) for kind in ("w13", "w2")]  # fmt: skip
TARGETS = ["nvfp4/modelopt", "nvfp4/compressed-tensors", "mxfp4/quark", "fp8/compressed-tensors"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders by name: "source" is bfloat16; "nvfp4/quark" and so on are made from it on demand."""
    root = tmp_path_factory.mktemp("convert")

    def folder(name: str) -> Path:
        path = root / name.replace("/", "_")
        if name == "source" and not path.exists():
            tiny.write_tiny(path, dtype="bfloat16", shard_mb=0.5)
        elif not path.exists():
            convert(folder("source"), path, *name.split("/"))
        return path

    return folder


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slabs for each expert, so that their seams are seen."""
    monkeypatch.setattr(blocks, "SLAB", 3000)


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, as the safetensors library reads it."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bool((one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)).all())
    )


@pytest.mark.parametrize("key", TARGETS)
def test_experts_are_what_the_formats_make_of_them_and_the_rest_is_untouched(folders, key) -> None:
    before, after = tensors(folders("source")), tensors(folders(key))
    form = q.LAYOUTS[key]
    expected = dict(before)
    for name in STACKS:
        weight = expected.pop(name).float()
        wanted = q.parts(form, name, tuple(weight.shape))
        made = q.encode(form, weight)
        if q.ORIGINAL in wanted:
            made[q.ORIGINAL] = torch.tensor(weight.shape)
        if form.reciprocal:
            # Block scales belong to the reciprocal that is stored, not to what it was taken of.
            from inkling_portable.formats import quantize_nvfp4

            made[q.CODES], made[q.SCALE], _ = quantize_nvfp4(weight, 1 / made[q.GLOBAL])
        expected |= {wanted[role].name: value for role, value in made.items()}
    assert set(after) == set(expected)
    assert [name for name in expected if not same(after[name], expected[name])] == []


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def by_hand(key: str, name: str, found: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """fp64 numbers of a stack by the published tables alone; shares nothing with the package."""
    stem = name.removesuffix("_weight")
    experts, rows, columns = shape
    if key == "fp8/compressed-tensors":
        return found[name].double() * found[f"{stem}_weight_scale"].double()
    codes = found[f"{name}.weight_packed" if "compressed" in key else name]
    table = torch.tensor(E2M1, dtype=torch.float64)
    numbers = torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), -1).flatten(-2)
    if key == "mxfp4/quark":
        power = found[f"{stem}_weight_scale"].double().view(experts, rows, columns // 32) - 127
        return numbers * torch.exp2(power).repeat_interleave(32, -1)
    scale = found[f"{name}.weight_scale" if "compressed" in key else f"{name}.scale"].double()
    numbers = numbers * scale.repeat_interleave(16, -1)
    if key == "nvfp4/modelopt":
        return numbers * found[f"{name}.scale2"].double()[:, None, None]
    return numbers / found[f"{name}.weight_global_scale"].double()[:, None, None]


@pytest.mark.parametrize("key", TARGETS)
def test_back_to_floats_is_the_published_arithmetic(folders, tmp_path: Path, key: str) -> None:
    found = tensors(folders(key))
    shapes = {name: tensors(folders("source"))[name].shape for name in STACKS}
    convert(folders(key), tmp_path / "fp32", "fp32")
    convert(folders(key), tmp_path / "bf16", "bf16")
    wide, narrow = tensors(tmp_path / "fp32"), tensors(tmp_path / "bf16")
    assert set(wide) == set(narrow) == set(tensors(folders("source")))
    for name in STACKS:
        exact = by_hand(key, name, found, shapes[name])
        # fp32 multiplies scales in another order than fp64; MXFP4 has nothing to round.
        bound = 0 if key == "mxfp4/quark" else 2**-23
        assert ((wide[name].double() - exact).abs() <= bound * exact.abs()).all()
        assert same(narrow[name], wide[name].bfloat16())
    config = json.loads((tmp_path / "bf16/config.json").read_text())
    assert config == json.loads((folders("source") / "config.json").read_text())
    assert not (tmp_path / "bf16/hf_quant_config.json").exists()


def test_mxfp4_to_nvfp4_and_back_loses_nothing(folders, tmp_path: Path) -> None:
    said = convert(folders("mxfp4/quark"), tmp_path / "nv", "nvfp4")
    assert "every number is what it was" in said and "16-bit activations" in said
    assert "every number is what it was" in convert(tmp_path / "nv", tmp_path / "mx", "mxfp4")
    found, first = tensors(tmp_path / "mx"), tensors(folders("mxfp4/quark"))
    for name in STACKS:
        shape = tensors(folders("source"))[name].shape
        again, once = (by_hand("mxfp4/quark", name, t, shape) for t in (found, first))
        assert torch.equal(again, once)


def test_mxfp4_blocks_beyond_nvfp4s_range_are_rounded_and_others_are_not(
    folders, tmp_path: Path
) -> None:
    shutil.copytree(folders("mxfp4/quark"), tmp_path / "source")
    [path] = [p for p in (tmp_path / "source").glob("*.safetensors")
              if STACKS[0] in read_header(p)]  # fmt: skip
    held = load_file(path)
    scales = held[f"{STACKS[0]}_scale"]
    scales[:] = 100
    scales[0, 0], scales[1, 0], scales[1, 1] = 117, 99, 90  # 18 and 27 octaves below the largest
    save_file(held, path)
    convert(tmp_path / "source", tmp_path / "nv", "nvfp4")
    shape = tensors(folders("source"))[STACKS[0]].shape
    exact = by_hand("mxfp4/quark", STACKS[0], tensors(tmp_path / "source"), shape)
    found = by_hand("nvfp4/modelopt", STACKS[0], tensors(tmp_path / "nv"), shape)
    far = torch.zeros(shape, dtype=torch.bool)
    far[0, 1, :64] = True
    assert torch.equal(found[~far], exact[~far])
    step = 2.0 ** (117 - 127 - 8) * 2.0**-9 * 0.5  # the smallest number that NVFP4 has there
    assert ((found - exact)[far].abs() <= step / 2).all() and not torch.equal(found, exact)


def test_nvfp4_changes_its_layout_with_its_codes_and_activations(folders, tmp_path: Path) -> None:
    """Activation scales survive; gate and up with scales of their own become one."""
    source = tmp_path / "source"
    shutil.copytree(folders("nvfp4/compressed-tensors"), source)
    for path in source.glob("*.safetensors"):
        held = load_file(path)
        for name in [n for n in held if n.endswith("weight_global_scale")]:
            base = name.removesuffix(".weight_global_scale")
            held[f"{base}.input_global_scale"] = torch.full_like(held[name], 2688 / 5.25)
            if base == STACKS[0]:
                held[name] = torch.stack((held[name], held[name] * 2), 1)
        save_file(held, path)
    (source / "model.safetensors.index.json").unlink()
    convert(source, tmp_path / "modelopt", "nvfp4", "modelopt")
    before, after = tensors(source), tensors(tmp_path / "modelopt")
    for name in STACKS:
        assert same(after[name], before[f"{name}.weight_packed"])
        assert after[f"{name}.input_amax"].tolist() == [5.25]
        if name != STACKS[0]:
            assert same(after[f"{name}.scale"], before[f"{name}.weight_scale"])
    gates = after[f"{STACKS[0]}.scale"][:, 0::2], before[f"{STACKS[0]}.weight_scale"][:, 0::2]
    assert same(*gates)  # the larger factor stays, so only rows of up have new scales
    quantised = json.loads((tmp_path / "modelopt/config.json").read_text())["quantization_config"]
    assert quantised["quant_algo"] == "NVFP4"
    convert(tmp_path / "modelopt", tmp_path / "back", "nvfp4", "compressed-tensors")
    back = tensors(tmp_path / "back")
    assert back[f"{STACKS[1]}.input_global_scale"].tolist() == [2688 / 5.25] * 8


def test_fp8_linear_layers_become_bf16(folders, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders("fp8/compressed-tensors"), source)
    [path] = [p for p in source.glob("*.safetensors")
              if "model.llm.layers.0.attn.wq_du.weight" in read_header(p)]  # fmt: skip
    held = load_file(path)
    name, other = (f"model.llm.layers.0.attn.{part}.weight" for part in ("wq_du", "wk_dv"))
    wanted = {}
    for weight, tiles in ((name, True), (other, False)):
        made = q.encode_linear(held[weight], tiles=tiles)
        held[weight], held[f"{weight}_scale"] = made[q.CODES], made[q.SCALE]
        scale = made[q.SCALE].repeat_interleave(128, 0).repeat_interleave(128, 1) if tiles else (
            made[q.SCALE])  # fmt: skip
        rows, columns = made[q.CODES].shape
        wanted[weight] = (made[q.CODES].float() * scale[:rows, :columns]).bfloat16()
    save_file(held, path)
    (source / "model.safetensors.index.json").unlink()
    said = convert(source, tmp_path / "bf16", "bf16")
    found = tensors(tmp_path / "bf16")
    assert "note: 2 linear layers in FP8 become BF16" in said
    assert all(same(found[weight], values) for weight, values in wanted.items())
    assert f"{name}_scale" not in found


def read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return header


@pytest.mark.parametrize("key", TARGETS)
def test_index_files_and_blocks(folders, key: str) -> None:
    source, folder = folders("source"), folders(key)
    files = read_headers(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    mtp = {name for name in files.shapes if name.startswith("model.mtp.")}
    assert mtp and set(index["weight_map"]) == set(files.shapes) - mtp
    assert all(files.file_of[name] == file for name, file in index["weight_map"].items())
    sizes = sum(t.nbytes for name, t in tensors(folder).items() if name not in mtp)
    assert index["metadata"]["total_size"] == sizes
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    block = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    text = json.dumps(block)
    for kept in ("layers.0.attn.wq_du", "layers.1.mlp.experts", "layers.2.mlp.shared_experts",
                 "layers.3.mlp.gate", "model.llm.unembed"):  # fmt: skip
        assert kept in text, kept
    assert "layers.2.mlp.experts" not in text and "layers.2[.]mlp" not in text
    if key == "nvfp4/modelopt":
        assert block["quant_algo"] == "W4A16_NVFP4"  # no scales of activations are known
        sidecar = json.loads((folder / "hf_quant_config.json").read_text())
        assert sidecar["quantization"]["exclude_modules"] == block["ignore"]
        assert sidecar["producer"]["name"] == "modelopt"
    with safe_open(next(folder.glob("model-*")), framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_error_report(folders, tmp_path: Path) -> None:
    said = convert(folders("source"), tmp_path / "out", "mxfp4")
    report = json.loads((tmp_path / "out/conversion.json").read_text())
    weights, found = tensors(folders("source")), tensors(tmp_path / "out")
    for name in STACKS:
        exact = weights[name].double()
        error = by_hand("mxfp4/quark", name, found, exact.shape) - exact
        db = 10 * math.log10(exact.square().sum() / error.square().sum())
        assert report["sqnr_db"][name] == pytest.approx(db, abs=0.006)
        assert f"{db:5.2f}" in said


def test_layers_are_chosen(folders, tmp_path: Path) -> None:
    convert(folders("source"), tmp_path / "all", "nvfp4", layers={1, 2, 3})
    convert(tmp_path / "all", tmp_path / "some", "mxfp4", layers={3})
    found = tensors(tmp_path / "some")
    kinds = {layer: found[f"model.llm.layers.{layer}.mlp.experts.w2_weight"].dtype
             for layer in (1, 2, 3)}  # fmt: skip
    assert kinds == {1: torch.bfloat16, 2: torch.bfloat16, 3: torch.uint8}
    block = json.loads((tmp_path / "some/config.json").read_text())["quantization_config"]
    assert "model.llm.layers.2.mlp.experts.w2_weight" in block["exclude"]
    # Layers that are quantised stay the ones that are.
    convert(tmp_path / "all", tmp_path / "same", "fp8")
    assert tensors(tmp_path / "same")[
        "model.llm.layers.1.mlp.experts.w2_weight"
    ].dtype == torch.float8_e4m3fn  # fmt: skip


@pytest.mark.parametrize("size", ["Inkling", "Inkling-Small"])
def test_released_sizes_are_planned_in_seconds(tmp_path: Path, size: str) -> None:
    """A sparse file stands for a whole released checkpoint; nothing of it is read."""
    raw = released(size)
    config = parse(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for file, specs in (("model.safetensors", tensor_specs(config)),
                        ("mtp.safetensors", mtp_specs(config))):  # fmt: skip
        header: dict[str, Any] = {}
        at = 0
        for spec in specs:
            nbytes = math.prod(spec.shape) * (4 if spec.fp32 else 2)
            header[spec.name] = {"dtype": "F32" if spec.fp32 else "BF16",
                                 "shape": spec.shape,
                                 "data_offsets": [at, at + nbytes]}  # fmt: skip
            at += nbytes
        text = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
    plan = make_plan(read_source(tmp_path), "nvfp4", None, None)
    text_config = config.text
    sparse = [i for i in range(text_config.num_layers) if not text_config.layer_is_dense(i)]
    assert list(plan.layers) == sparse[1:]  # 3 to 65 of Inkling, as released
    # Half a byte and a sixteenth for each weight where there were two bytes.
    weights = 3 * text_config.num_experts * text_config.expert_width * text_config.hidden_size
    before = sum((tmp_path / f).stat().st_size for f in ("model.safetensors", "mtp.safetensors"))
    saved = len(plan.layers) * weights * (2 - 0.5 - 1 / 16)
    assert plan.nbytes == pytest.approx(before - saved, rel=1e-5)


# --- refusals -------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence of a refused command."""
    assert command.main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("inkling-portable convert: ") and error.count("\n") == 1
    assert error.count(". ") == 0, error
    return error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--to", "int4"], "int4"),
        (["--to", "mxfp4", "--layout", "modelopt"], "mxfp4 as modelopt"),
        (["--to", "bf16", "--layout", "modelopt"], "bf16 has no layouts"),
        (["--to", "nvfp4", "--layers", "0"], "layer 0 is dense"),
        (["--to", "nvfp4", "--layers", "2-4"], "layer 4 does not exist"),
        (["--to", "nvfp4", "--layers", "3-2"], "3-2"),
        (["--to", "nvfp4", "--layers", "two"], "two"),
        (["--to", "bf16", "--layers", "2"], "--layers"),
        (["--to", "bf16"], "nothing to convert"),
        ([], "--to"),
    ],
)
def test_bad_arguments(folders, tmp_path: Path, capsys, arguments, named) -> None:
    assert named in run(capsys, folders("source"), tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_folders_that_will_not_do(folders, tmp_path: Path, capsys) -> None:
    source = folders("source")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    to = ("--to", "nvfp4")
    assert "no folder" in run(capsys, "org/repository", tmp_path / "out", *to)
    assert "config.json is missing" in run(capsys, tmp_path / "empty", tmp_path / "out", *to)
    assert "is a file" in run(capsys, source, tmp_path / "file", *to)
    below = run(capsys, source, tmp_path / "file/below", *to)
    assert "file/below/.converting cannot be used (Not a directory); name" in below
    assert "--force" in run(capsys, source, tmp_path / "full", *to)
    assert "apart" in run(capsys, source, source, *to)
    assert "apart" in run(capsys, source, source / "below", *to)
    assert sorted(p.name for p in (tmp_path / "full").iterdir()) == ["notes.txt"]
    assert command.main([str(source), str(tmp_path / "full"), *to, "--force", "--quiet"]) == 0
    assert (tmp_path / "full/notes.txt").read_text() == "mine"
    # A forced run replaces a checkpoint as a whole.
    assert command.main([str(folders("mxfp4/quark")), str(tmp_path / "full"), "--to", "bf16",
                         "--force", "--quiet"]) == 0  # fmt: skip
    assert not (tmp_path / "full/hf_quant_config.json").exists()
    assert set(tensors(tmp_path / "full")) == set(tensors(source))
    assert command.main([str(source), str(tmp_path / "dry"), *to, "--dry-run"]) == 0
    assert "would be nvfp4/modelopt, experts of layers 2-3" in capsys.readouterr().out
    assert not (tmp_path / "dry").exists()


def edited(folder: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of the file that holds `name`, and drop the index."""
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        if name in held:
            change(held)
            save_file(held, path)
    (folder / "model.safetensors.index.json").unlink()


W2 = STACKS[1]


def set_value(name: str, index: Any, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(held: dict[str, Tensor]) -> None:
        raw = held[name]
        (raw.view(torch.uint8) if raw.element_size() == 1 else raw)[index] = value

    return change


def replace_by(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(held: dict[str, Tensor]) -> None:
        held[name] = make(held[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("key", "name", "change", "said"),
    [
        ("source", W2, set_value(W2, (3, 5, 7), math.nan), "expert 3: .*NaN"),
        ("source", W2, set_value(W2, (3, 5, 7), math.inf), "expert 3: .*infinity"),
        ("source", W2, lambda h: h.pop(W2), "is missing"),
        ("source", W2, replace_by(W2, lambda w: w[:7]), r"needs shape \[8, 128, 64\]"),
        ("source", W2, replace_by(W2, lambda w: w.to(torch.float8_e4m3fn)), "no known layout"),
        ("nvfp4/modelopt", W2, set_value(f"{W2}.scale2", 4, 0.0), "expert 4: .*positive"),
        ("nvfp4/modelopt", W2, set_value(f"{W2}.scale", (5, 0, 0), 0x7F), "expert 5: .*NaN"),
        ("nvfp4/modelopt", W2, replace_by(f"{W2}.scale", lambda s: s[:, :, :2]), "needs shape"),
        ("nvfp4/modelopt", W2, lambda h: h.pop(f"{W2}.scale2"), "no known layout"),
        ("nvfp4/modelopt", W2, replace_by(f"{W2}.scale2", lambda s: s.int()), "known .*scale2 I32"),
        ("mxfp4/quark", W2, set_value(f"{W2}_scale", (128, 0), 255), "expert 1: .*255"),
        ("mxfp4/quark", W2, replace_by(f"{W2}_scale", lambda s: s[:-1]), "needs shape"),
        ("fp8/compressed-tensors", W2, set_value(W2, (0, 0, 0), 0x7F), "expert 0: .*NaN"),
        ("fp8/compressed-tensors", W2, set_value(f"{W2}_scale", (6, 0), 0), "expert 6: .*pos"),
    ],
)  # fmt: skip
def test_damaged_tensors(folders, tmp_path: Path, key, name, change, said) -> None:
    shutil.copytree(folders(key), tmp_path / "source")
    edited(tmp_path / "source", name, change)
    to = "fp8" if key == "source" else "bf16"
    with pytest.raises(ConvertError, match=rf"tensor {W2}[^\n]*{said}") as error:
        convert(tmp_path / "source", tmp_path / "out", to)
    assert ".safetensors" in str(error.value) or "missing" in said
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out/config.json").exists()
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_data_that_no_tensor_owns_or_two_do(folders, tmp_path: Path, capsys) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders("source"), source)
    path = source / "mtp.safetensors"
    sound = path.read_bytes()
    path.write_bytes(sound + bytes(64))
    error = run(capsys, source, tmp_path / "out", "--to", "nvfp4")
    assert f"file {path.name} has bytes that no tensor owns, or that two tensors own" in error
    size = struct.unpack("<Q", sound[:8])[0]
    header = json.loads(sound[8 : 8 + size])
    _, second, *_ = sorted((n for n in header if n != "__metadata__"),
                           key=lambda n: header[n]["data_offsets"])  # fmt: skip
    header[second]["data_offsets"] = [at - 2 for at in header[second]["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + sound[8 + size :])
    error = run(capsys, source, tmp_path / "out", "--to", "nvfp4")
    assert f"file {path.name} has bytes that no tensor owns, or that two tensors own" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "mtp.safetensors"])
def test_json_beyond_any_depth(folders, tmp_path: Path, capsys, name: str) -> None:
    shutil.copytree(folders("source"), tmp_path / "source")
    deep = b"[" * 100_000
    size = struct.pack("<Q", len(deep)) if name.startswith("mtp") else b""
    (tmp_path / "source" / name).write_bytes(size + deep)
    error = run(capsys, tmp_path / "source", tmp_path / "out", "--to", "nvfp4")
    assert f"file {name} " in error and "download it again" in error


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"quant_method": "awq"}, "config.json: .* method awq is not known"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "method modelopt is not known"),
        (config_block(LAYOUTS["mxfp4/quark"], [], []), "is stored as nvfp4/modelopt, but .* mxfp4"),
        (None, "is stored as nvfp4/modelopt, but .* says nothing"),
        ([4], r"quantization_config in config.json is \[4\]"),
    ],
)
def test_blocks_that_are_unknown_or_belong_to_other_tensors(folders, tmp_path, block, said) -> None:
    shutil.copytree(folders("nvfp4/modelopt"), tmp_path / "source")
    path = tmp_path / "source/config.json"
    (tmp_path / "source/hf_quant_config.json").unlink()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": block}))
    with pytest.raises(ConvertError, match=said):
        convert(tmp_path / "source", tmp_path / "out", "bf16")


@pytest.mark.parametrize("place", ["{root}/outside.safetensors", "../outside.safetensors"])
def test_an_index_cannot_lead_out_of_the_folder(folders, tmp_path, capsys, place: str) -> None:
    source, outside = tmp_path / "source", tmp_path / "outside.safetensors"
    shutil.copytree(folders("source"), source)
    shutil.move(source / "mtp.safetensors", outside)
    before = outside.read_bytes()
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for name in read_header(outside):
        if name != "__metadata__":
            index["weight_map"][name] = place.format(root=tmp_path)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    error = run(capsys, source, tmp_path / "out", "--to", "nvfp4")
    assert "outside.safetensors is named in model.safetensors.index.json" in error
    assert outside.read_bytes() == before and not (tmp_path / "out").exists()


def test_a_disk_that_fails(folders, tmp_path: Path, capsys, monkeypatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    arguments = (folders("source"), tmp_path / "out", "--to", "nvfp4", "--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        assert "cannot be written (Input/output error)" in run(capsys, *arguments)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        assert "tensor model." in (error := run(capsys, *arguments)) and "cannot be read" in error


def test_columns_that_blocks_do_not_divide(tmp_path: Path, capsys) -> None:
    tiny.write_tiny(tmp_path / "source", intermediate_size=48, dtype="bfloat16")
    error = run(capsys, tmp_path / "source", tmp_path / "out", "--to", "mxfp4")
    assert "w2_weight has 48 columns" in error and "model.safetensors" in error
    assert command.main([str(tmp_path / "source"), str(tmp_path / "out"), "--to", "nvfp4",
                         "--quiet"]) == 0  # fmt: skip


def test_one_sparse_layer_has_to_be_named(tmp_path: Path, capsys) -> None:
    tiny.write_tiny(tmp_path / "source", layers=2)
    error = run(capsys, tmp_path / "source", tmp_path / "out", "--to", "nvfp4")
    assert "only sparse layer is 1" in error
    convert(tmp_path / "source", tmp_path / "out", "nvfp4", layers={1})
