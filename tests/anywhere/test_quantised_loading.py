"""What a rank's parameters hold of a quantised checkpoint, and files that cannot be loaded.

Expected values are sliced here by pairs of rows, blocks of columns and experts; the products of
all ranks' shares are then summed and compared with the whole, decoded from the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inkling_portable.backends.reference.experts import routed_experts
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.model import checkpoint, loading
from inkling_portable.model import quant_layouts as quant
from inkling_portable.model.checkpoint import CheckpointError, Experts, Shard
from inkling_portable.model.config import InklingConfig, parse
from inkling_portable.model.quant_layouts import LAYOUTS, Layout

LAYER = 3
WHERE = f"model.llm.layers.{LAYER}.mlp.experts."
TO = f"model.layers.{LAYER}.mlp.experts.routed_experts."
FILE = "model.safetensors"
Checkpoint = tuple[InklingConfig, Path, Layout]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A function from a layout's key to a checkpoint in it, with 8 experts of width 64."""
    root = tmp_path_factory.mktemp("quantised")

    def get(key: str) -> Checkpoint:
        folder, form = root / key.replace("/", "-"), LAYOUTS[key]
        if not folder.exists():
            write_tiny(folder, dtype="float32", weights=form.format, layout=form.name)
        return parse(json.loads((folder / "config.json").read_text())), folder, form

    return get


class Parameters(nn.Module):
    """Empty parameters under dotted names, every byte of them set."""

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        self.params = {}
        for name, (shape, dtype) in shapes.items():
            data = torch.empty(shape, dtype=dtype)
            data.view(torch.uint8).fill_(0x7F)
            self.params[name] = nn.Parameter(data, requires_grad=False)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self.params.items())


def own_shapes(
    form: Layout, experts: int, hidden: int, width: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    out = {}
    e4m3, u8, fp32 = torch.float8_e4m3fn, torch.uint8, torch.float32
    codes, scale = {"nvfp4": (u8, e4m3), "mxfp4": (u8, u8), "fp8": (e4m3, fp32)}[form.format]
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        stored = columns if form.format == "fp8" else columns // 2
        out[f"{TO}{name}_weight"] = ((experts, rows, stored), codes)
        blocks = columns // form.block if form.block else 1
        out[f"{TO}{name}_scale"] = ((experts, rows, blocks), scale)
        if form.format == "nvfp4":
            gain = (experts, 2) if name == "w13" else (experts,)
            out[f"{TO}{name}_global"] = (gain, fp32)
    return out


def plan_of(config: InklingConfig, files: loading.Files, share: Experts) -> dict[str, Any]:
    plain = {i: Experts() for i in range(config.text.num_layers)}
    shard = Shard(layers={**plain, 2: Experts(layout=share.layout), LAYER: share})
    plan = checkpoint.plan(config, files.shapes, shard, range(config.text.num_layers))
    checkpoint.check(plan, files.shapes, files.file_of, types=files.types)
    return {name: stored for name, stored in plan.items() if name.startswith(WHERE)}


def load_share(found: Checkpoint, share: Experts, local: int, width: int) -> dict[str, Tensor]:
    config, folder, form = found
    files = loading.read_headers(folder)
    module = Parameters(own_shapes(form, local, config.text.hidden_size, width))
    weights = load_file(folder / FILE)
    loading.load(module, weights.items(), plan_of(config, files, share), files, False)
    return {name.removeprefix(TO): p.data for name, p in module.params.items()}


def products(share: dict[str, Tensor], form: Layout, x: Tensor, ids: Tensor, weights: Tensor
             ) -> Tensor:  # fmt: skip
    gain = share.get("w13_global")
    if gain is not None:
        gain = gain.repeat(1, share["w13_weight"].shape[1] // 2)
    return routed_experts(
        x, ids, weights, share["w13_weight"], share["w2_weight"], share["w13_scale"],
        share["w2_scale"], gain, share.get("w2_global"), form.format, "bf16", True,
    )  # fmt: skip


def decoded(found: Checkpoint) -> tuple[Tensor, Tensor]:
    _, folder, form = found
    tensors = load_file(folder / FILE)
    whole = []
    for name in quant.EXPERT_WEIGHTS:
        spelled = quant.find(form, WHERE + name, tensors)
        assert spelled is not None
        parts = {role: tensors[n] for role, n in spelled.items()}
        whole.append(quant.decode(form, parts, torch.float64))
    return whole[0], whole[1]


@pytest.mark.parametrize("key", LAYOUTS)
@pytest.mark.parametrize("split", ["whole", "by width", "by expert"])
def test_shares_sum_to_the_whole(
    written: Callable[[str], Checkpoint], key: str, split: str
) -> None:
    found = written(key)
    config, _, form = found
    text = config.text
    draw = torch.Generator().manual_seed(5)
    x = torch.randn((7, text.hidden_size), generator=draw).double()
    ids = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(7)]).int()
    weights = torch.rand((7, 2), generator=draw)
    w13, w2 = decoded(found)
    whole = routed_experts(x, ids, weights, w13, w2, None, None, None, None, "bf16", "bf16", True)
    total = torch.zeros_like(whole)
    if split == "whole":
        shares = [Experts(own=True, layout=form)]
    elif split == "by width":
        shares = [Experts(None, rank, 2, own=True, layout=form) for rank in (0, 1)]
    else:
        # Three ranks for eight experts: the last has two.
        shares = [Experts(tuple(r), own=True, layout=form)
                  for r in (range(3), range(3, 6), range(6, 8))]  # fmt: skip
    for share in shares:
        local = text.num_experts if share.ids is None else len(share.ids)
        held = load_share(found, share, local, text.expert_width // share.size)
        first = share.ids[0] if share.ids else 0
        total += products(held, form, x, ids - first, weights)
    # NVFP4's factors of compressed-tensors are stored upside down, and rounded once more.
    bound = 1e-6 if form.reciprocal else 1e-12
    assert (total - whole).abs().max() <= bound * whole.abs().max()


@pytest.mark.parametrize("key", LAYOUTS)
def test_the_engines_parameters(written: Callable[[str], Checkpoint], key: str) -> None:
    """Rank 1 of 2, with a gate block that the engine made taller than the share, and columns too.

    Names are those of vLLM's own methods; gate rows stand before up rows.
    """
    found = written(key)
    config, folder, form = found
    tensors, files = load_file(folder / FILE), loading.read_headers(folder)
    hidden, width, tall = config.text.hidden_size, 32, 48
    share = Experts(None, 1, 2, rows=tall, layout=form)
    plan = plan_of(config, files, share)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for role, end in checkpoint.ENGINE_PARAMS[key].items():
        for name, rows, columns in (("w13", 2 * tall, hidden), ("w2", hidden, tall)):
            stored = tensors.get((quant.find(form, f"{WHERE}{name}_weight", tensors) or {})[role])
            assert stored is not None
            last = {quant.CODES: columns // (1 if form.format == "fp8" else 2),
                    quant.SCALE: columns // form.block if form.block else 1}  # fmt: skip
            shape = (8, rows, last[role]) if role in last else ((8, 2) if name == "w13" else (8,))
            dtype = stored.dtype if role in last else torch.float32
            shapes[f"{TO}{name}{end}"] = (shape, dtype)
    module = Parameters(shapes)
    loading.load(module, tensors.items(), plan, files, False)
    for name, rule in (("w13", "rows"), ("w2", "columns")):
        spelled = quant.find(form, f"{WHERE}{name}_weight", tensors)
        assert spelled is not None
        for role, end in checkpoint.ENGINE_PARAMS[key].items():
            loaded, stored = module.params[f"{TO}{name}{end}"], tensors[spelled[role]]
            if role == quant.INPUT:
                wanted = stored.float() / 2688 if form.name == "modelopt" else stored
                wanted = wanted.reshape(-1, 1).expand(8, 2 if name == "w13" else 1)
                assert torch.equal(loaded, wanted.reshape(loaded.shape))
                continue
            if role == quant.GLOBAL:
                assert torch.equal(
                    loaded, stored[:, None].expand(8, 2) if name == "w13" else stored
                )
                continue
            loaded = loaded.view(torch.uint8) if loaded.element_size() == 1 else loaded
            stored = stored.view(torch.uint8) if stored.element_size() == 1 else stored
            rows = 128 if name == "w13" else hidden
            stored = stored.view(8, rows, -1)
            if rule == "rows":
                gate, up = stored[:, 64::2], stored[:, 65::2]
                assert torch.equal(loaded[:, :width], gate)
                assert torch.equal(loaded[:, tall : tall + width], up)
                assert not loaded[:, width:tall].any()
            elif stored.shape[2] == 1:
                assert torch.equal(loaded, stored)
            else:
                half = stored.shape[2] // 2
                assert torch.equal(loaded[:, :, :half], stored[:, :, half:])
                assert not loaded[:, :, half:].any()


def spoil(
    found: Checkpoint, tmp_path: Path, edit: Callable[[dict[str, Tensor]], Any]
) -> Checkpoint:
    config, folder, form = found
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, tmp_path / FILE)
    return config, tmp_path, form


def test_gate_and_up_with_factors_of_their_own(
    written: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    name = f"{WHERE}w13_weight.weight_global_scale"

    def halves(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.stack([tensors[name], tensors[name] * 2], 1)

    found = spoil(written("nvfp4/compressed-tensors"), tmp_path, halves)
    held = load_share(found, Experts(own=True, layout=found[2]), 8, 64)
    stored = load_file(tmp_path / FILE)[name]
    assert torch.equal(held["w13_global"], stored.reciprocal())


def test_a_matrix_in_fp8_becomes_plain(written: Callable[[str], Checkpoint]) -> None:
    for key in ("nvfp4/compressed-tensors", "fp8/compressed-tensors"):
        config, folder, form = written(key)
        tensors, files = load_file(folder / FILE), loading.read_headers(folder)
        base = "model.llm.layers.0.attn."
        shard = Shard(1, 2, layers={i: Experts(layout=form) for i in (2, 3)})
        plan = checkpoint.plan(config, files.shapes, shard, range(config.text.num_layers))
        mine = {n: s for n, s in plan.items() if n.startswith(base + "w") and ".w" in n}
        part, out = "model.layers.0.attn.qkvr.weight", "model.layers.0.attn.wo_ud.weight"
        module = Parameters({part: ((64 + 32 + 32 + 16, 128), torch.float32),
                             out: ((128, 64), torch.float32)})  # fmt: skip
        # Scales before and after their weights.
        for order in (sorted(tensors), sorted(tensors, reverse=True)):
            loading.load(module, ((n, tensors[n]) for n in order), mine, files, False)
            codes, scale = tensors[f"{base}wo_ud.weight"], tensors[f"{base}wo_ud.weight_scale"]
            assert torch.equal(module.params[out], (codes.float() * scale)[:, 64:])
            assert torch.equal(module.params[part][128:], tensors[f"{base}wr_du.weight"][16:])


Edit = Callable[[dict[str, Tensor]], Any]
W13 = f"{WHERE}w13_weight"
BAD: dict[str, tuple[str, str, Edit, str]] = {
    "a NaN scale": ("nvfp4/modelopt", f"{W13}.scale",
        lambda t: t[f"{W13}.scale"].view(torch.uint8)[7, 127].fill_(0xFF), "has a NaN where"),
    "a global scale of zero": ("nvfp4/modelopt", f"{W13}.scale2",
        lambda t: t[f"{W13}.scale2"][5].zero_(), "has the value 0 where a scale is needed"),
    "an infinite one": ("nvfp4/compressed-tensors", f"{W13}.weight_global_scale",
        lambda t: t[f"{W13}.weight_global_scale"][5].fill_(float("inf")), "has the value inf"),
    "code 255": ("mxfp4/quark", f"{W13}_scale",
        lambda t: t[f"{W13}_scale"][1000, 3].fill_(255), "has E8M0 code 255, which is NaN,?"),
    "a negative scale": ("fp8/compressed-tensors", f"{W13}_scale",
        lambda t: t[f"{W13}_scale"][0, 0].fill_(-1), "has the value -1"),
    "a NaN weight": ("fp8/compressed-tensors", W13,
        lambda t: t[W13].view(torch.uint8)[0, 0, 0].fill_(0x7F), "has NaN or infinite values"),
    "a scale of another shape": ("nvfp4/modelopt", f"{W13}.scale",
        lambda t: t.update({f"{W13}.scale": t[f"{W13}.scale"][:, :, :4].contiguous()}),
        r"needs shape \[8, 128, 8\]; found \[8, 128, 4\]"),
    "blocks of 16 for 32": ("mxfp4/quark", f"{W13}_scale",
        lambda t: t.update({f"{W13}_scale": t[f"{W13}_scale"].repeat(1, 2)}),
        r"needs shape \[1024, 4\]; found \[1024, 8\]"),
    "a scale without its factor": ("nvfp4/modelopt", f"{W13}.scale2",
        lambda t: t.pop(f"{W13}.scale2"), "is missing from the checkpoint"),
    "a weight of another type": ("nvfp4/modelopt", W13,
        lambda t: t.update({W13: t[W13].view(torch.int8)}),
        "is stored as I8, and packed E2M1 needs U8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files(written: Callable[[str], Checkpoint], tmp_path: Path, case: str) -> None:
    key, name, edit, sentence = BAD[case]
    found = spoil(written(key), tmp_path, edit)
    where = "" if "missing" in sentence else f" in {FILE}"
    with pytest.raises(CheckpointError, match=f"^tensor {name}{where} {sentence}"):
        load_share(found, Experts(own=True, layout=found[2]), 8, 64)


def test_quantised_tensors_without_a_word_in_the_config(
    written: Callable[[str], Checkpoint],
) -> None:
    config, folder, _ = written("mxfp4/quark")
    files = loading.read_headers(folder)
    plan = checkpoint.plan(config, files.shapes, Shard(), range(config.text.num_layers))
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.mlp\.experts\.w13_weight in .* needs sh"
    ):
        checkpoint.check(plan, files.shapes, files.file_of, types=files.types)


def test_a_layer_said_to_be_quantised_that_is_not(written: Callable[[str], Checkpoint]) -> None:
    config, folder, form = written("mxfp4/quark")
    files = loading.read_headers(folder)
    shard = Shard(experts=Experts(layout=form))
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.w13_weight has no mxfp4 sc"
    ):
        checkpoint.plan(config, files.shapes, shard, range(config.text.num_layers))


@pytest.mark.parametrize(("key", "ranks"), [("mxfp4/quark", 4), ("nvfp4/modelopt", 8)])
def test_a_split_that_would_cut_a_block(
    written: Callable[[str], Checkpoint], key: str, ranks: int
) -> None:
    config, folder, form = written(key)
    share = Experts(None, 0, ranks, own=True, layout=form)
    sentence = rf"expert width 64 over {ranks} ranks gives {64 // ranks} .* blocks of {form.block}"
    with pytest.raises(CheckpointError, match=sentence):
        plan_of(config, loading.read_headers(folder), share)
