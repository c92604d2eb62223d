"""Our experts where the engine's own method cannot be built: MXFP4 on an MI300X, asked for AITER.

The platform is faked for vLLM, whose own classes then raise; ours never ask for them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.platforms import current_platform

from inkling_portable.backends.reference.experts import routed_experts
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.formats import arranged
from inkling_portable.model import checkpoint, loading
from inkling_portable.model import quant_layouts as quant
from inkling_portable.model.engine import build_routed_experts
from inkling_portable.model.experts import MoE, OwnExperts, OwnWeights
from inkling_portable.model.settings import Settings
from inkling_portable.model.weight_format import read_block
from inkling_portable.registry import SelectionError
from inkling_portable.target import Target
from tests.vllm_cpu.conftest import Engine

MI300X = "rocm:gfx942/304+triton=3.6.0+vllm=0.33.0"
LAYER = "model.layers.3.mlp"


@pytest.fixture
def gfx942(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM sees of the machine becomes an MI300X with AITER, once all is settled."""
    from vllm._aiter_ops import rocm_aiter_ops

    rocm = ModuleType("vllm.platforms.rocm")
    for name in ("on_gfx950", "on_gfx1250", "on_gfx1x", "on_gfx12x"):
        setattr(rocm, name, lambda: False)
    for name in ("on_gfx942", "on_gfx9", "on_mi3xx"):
        setattr(rocm, name, lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", rocm)
    monkeypatch.setattr(rocm_aiter_ops, "is_enabled", lambda: True)
    platform = type(current_platform)
    for name, value in (("is_rocm", True), ("is_cpu", False), ("is_cuda_alike", True)):
        monkeypatch.setattr(platform, name, lambda self, value=value: value)


@pytest.fixture
def config(engines: Callable[..., Engine]) -> Iterator[VllmConfig]:
    """The current config of vLLM, with `--moe-backend aiter`."""
    found = copy.copy(engines(block_size=16).llm.llm_engine.vllm_config)
    found.kernel_config = copy.copy(found.kernel_config)
    found.kernel_config.moe_backend = "aiter"
    found.compilation_config = copy.copy(found.compilation_config)
    found.compilation_config.static_forward_context = {}
    with set_current_vllm_config(found):
        yield found


@pytest.fixture
def settings(engines: Callable[..., Engine], tmp_path: Path, config: VllmConfig) -> Settings:
    """What is settled for a tiny MXFP4 checkpoint of the same sizes on that machine."""
    write_tiny(tmp_path, weights="mxfp4", layout="quark", dtype="float32")
    block = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    base = engines(block_size=16).on_model(lambda model: model.settings)
    return dataclasses.replace(
        base,
        target=Target.parse(MI300X),
        facts=dataclasses.replace(base.facts, weights="mxfp4"),
        requests=(("routed_experts", "triton"),),
        quantisation=read_block(block),
        engine_quant=get_quantization_config("quark").from_config(copy.deepcopy(block)),
        stored=frozenset(loading.read_headers(tmp_path).shapes),
    )


def test_a_layer_in_bf16_is_not_held_to_what_was_asked_for_the_rest(settings: Settings) -> None:
    asked = dataclasses.replace(
        settings,
        target=Target.parse("h200+triton=3.6.0+vllm=0.33.0"),
        facts=dataclasses.replace(settings.facts, dtype="bfloat16"),
        requests=(("routed_experts", "mma"),),
    )

    def chosen(format: str) -> list[str]:
        found = asked.expert_ops(format).decisions
        return [d.provider for d in found if (d.op, d.verdict) == ("routed_experts", "chosen")]

    assert (chosen("mxfp4"), chosen("bf16")) == (["mma"], ["engine"])
    plain = dataclasses.replace(asked, facts=dataclasses.replace(asked.facts, weights="bf16"))
    with pytest.raises(SelectionError, match="mma: needs weights nvfp4 or mxfp4; asked is bf16"):
        plain.expert_ops("bf16")


@pytest.mark.usefixtures("gfx942")
def test_the_engines_method_raises_there(settings: Settings) -> None:
    with pytest.raises(Exception, match=r"(?i)aiter.*does not support|routing"):
        build_routed_experts(
            experts=8, top_k=2, hidden=128, width=64, select=lambda *_: None,
            quant_config=settings.engine_quant, prefix=f"{LAYER}.experts",
        )  # fmt: skip


@pytest.mark.usefixtures("gfx942")
def test_ours_loads_and_computes_there(settings: Settings, tmp_path: Path) -> None:
    moe = MoE(settings, None, LAYER)
    assert moe.own
    assert moe.experts.share().layout is settings.quantisation.layout
    files = loading.read_headers(tmp_path)
    shard = checkpoint.Shard(layers={
        1: checkpoint.Experts(), 2: moe.share(), 3: moe.share(),
    })  # fmt: skip
    where = "model.llm.layers.3.mlp.experts."
    plan = checkpoint.plan(settings.config, files.shapes, shard, range(4))
    mine = {name: stored for name, stored in plan.items() if name.startswith(where)}
    tensors = load_file(tmp_path / "model.safetensors")
    holder = nn.Module()
    holder.model = nn.Module()
    holder.model.layers = nn.ModuleDict({"3": nn.Module()})
    holder.model.layers["3"].mlp = nn.Module()
    holder.model.layers["3"].mlp.experts = moe.experts
    loading.load(holder, tensors.items(), mine, files, False)
    moe.experts.quant_method.process_weights_after_loading(moe.experts)
    # What the chosen kernel is held to, since it runs on no CPU.
    moe.experts.ops = SimpleNamespace(routed_experts=routed_experts)
    draw = torch.Generator().manual_seed(3)
    x = torch.randn((5, 128), generator=draw)
    ids = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(5)]).int()
    weights = torch.rand((5, 2), generator=draw)
    dense = [
        quant.decode(quant.layout("mxfp4"), {
            role: tensors[name]
            for role, name in (quant.find(quant.layout("mxfp4"), where + w, tensors) or {}).items()
        })
        for w in quant.EXPERT_WEIGHTS
    ]  # fmt: skip
    wanted = routed_experts(x, ids, weights, *dense, *4 * (None,), "bf16", "bf16", True)
    assert torch.equal(moe.experts(x, weights, ids), wanted)


@pytest.mark.parametrize("width", [128, 96])
def test_codes_are_arranged_once_for_the_kernel_that_wants_it(
    settings: Settings, width: int
) -> None:
    """Where its columns fit; a saved state says so, or what reads it would do it again."""
    text = dataclasses.replace(settings.text, expert_width=width)
    asked = dataclasses.replace(
        settings,
        target=Target.parse("h200+triton=3.6.0+vllm=0.33.0"),
        facts=dataclasses.replace(settings.facts, dtype="bfloat16"),
        requests=(("routed_experts", "mma"),),
        config=dataclasses.replace(settings.config, text=text),
    )
    moe = OwnExperts(asked, "mxfp4", asked.expert_layout(3))
    own, draw = moe.routed_experts, torch.Generator().manual_seed(5)
    stored = [torch.randint(0, 256, w.shape, generator=draw, dtype=torch.uint8)
              for w in (own.w13_weight, own.w2_weight)]  # fmt: skip
    for weight, values in zip((own.w13_weight, own.w2_weight), stored, strict=True):
        weight.data.copy_(values)
    for _ in range(2):
        moe.quant_method.process_weights_after_loading(moe)
    held = [own.w13_weight.data, own.w2_weight.data]
    assert moe.format == "mxfp4" + "-arranged" * (width == 128)
    assert all(map(torch.equal, held, map(arranged, stored) if width == 128 else stored))
    assert bool(own.state_dict()["arranged"]) == (width == 128)
    called: list[Any] = []
    moe.ops = SimpleNamespace(routed_experts=lambda *args: called.extend(args))
    moe(torch.zeros(1, 128), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32))
    assert called[9] == moe.format and torch.equal(called[3], held[0])


def test_factors_of_gate_and_up_take_the_ops_form() -> None:
    own = OwnWeights(32, 16, 2, quant.layout("nvfp4"))
    own.w13_global.data.copy_(torch.tensor([[2.0, 2.0], [3.0, 3.0]]))
    own.finish()
    assert own.w13_global.tolist() == [2.0, 3.0]
    own = OwnWeights(32, 16, 1, quant.layout("nvfp4"))
    own.w13_global.data.copy_(torch.tensor([[2.0, 5.0]]))
    own.finish()
    assert own.w13_global.tolist() == [[2.0, 5.0] * 16]  # rows alternate
    own.finish()
    assert own.w13_global.shape == (1, 32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"ep": 4, "tp": 2},
            "data-parallel ranks need vLLM.s own layer.; accepted would be engine",
        ),
        ({"lora": True}, "need lora False; found True"),
    ],
)
def test_what_only_the_engine_serves(
    settings: Settings, changes: dict[str, Any], sentence: str
) -> None:
    other = dataclasses.replace(settings, facts=dataclasses.replace(settings.facts, **changes))
    with pytest.raises(Exception, match=sentence):
        MoE(other, None, LAYER)


def test_rounding_at_start_is_the_engines(settings: Settings) -> None:
    from inkling_portable.model.weight_format import rounded_at_start

    online = rounded_at_start(SimpleNamespace(get_name=lambda: "fp8"))
    other = dataclasses.replace(settings, quantisation=online)
    with pytest.raises(Exception, match="need weights bf16; found fp8"):
        MoE(other, None, LAYER)
