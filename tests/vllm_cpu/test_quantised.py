"""Quantised checkpoints through vLLM's engine equal transformers on the numbers they stand for.

The plain twin is made here from the files alone, by the published description of each form.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inkling_portable.commands.convert import convert
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.model import experts, self_check
from tests.vllm_cpu.conftest import Engine, Oracle, prompt

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CASES = {
    "nvfp4 by ModelOpt": ("nvfp4", "modelopt"),
    "nvfp4 by compressed-tensors": ("nvfp4", "compressed-tensors"),
    "mxfp4 by Quark": ("mxfp4", "quark"),
    "fp8 by compressed-tensors": ("fp8", "compressed-tensors"),
}


def fp4(codes: Tensor) -> Tensor:
    """Two numbers in each byte, that of the even column in the low half."""
    return torch.stack((E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]), -1).flatten(-2)


def spread(scale: Tensor, columns: int) -> Tensor:
    return scale.float().repeat_interleave(columns // scale.shape[-1], -1)


def plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint in float32."""
    out: dict[str, Tensor] = {}
    for name, t in tensors.items():
        if "lora_" in name:
            continue
        if name.endswith(".scale2"):  # ModelOpt
            base = name.removesuffix(".scale2")
            w = fp4(tensors[base]) * spread(tensors[f"{base}.scale"], 2 * tensors[base].shape[-1])
            out[base] = w * t[:, None, None]
        elif name.endswith(".weight_packed"):  # compressed-tensors
            base = name.removesuffix(".weight_packed")
            w = fp4(t) * spread(tensors[f"{base}.weight_scale"], 2 * t.shape[-1])
            out[base] = w / tensors[f"{base}.weight_global_scale"][:, None, None]
        elif name.endswith("_weight_scale") and t.dtype == torch.uint8:  # Quark
            base = name.removesuffix("_scale")
            w = fp4(tensors[base])
            powers = t.view(*w.shape[:2], -1).view(torch.float8_e8m0fnu)
            out[base] = w * spread(powers, w.shape[-1])
        elif name.endswith("weight_scale") and f"{name.removesuffix('_scale')}" in tensors:  # FP8
            base = name.removesuffix("_scale")
            w = tensors[base].float()
            if t.shape[-1] > 1 or t.shape[-2] < w.shape[-2]:
                tall = t.repeat_interleave(128, 0)[: w.shape[0]]
                t = tall.repeat_interleave(128, 1)[:, : w.shape[1]]
            out[base] = w * t
        elif t.dtype in (torch.float32, torch.bfloat16) and "input_" not in name:
            out.setdefault(name, t)
    return {name: t for name, t in out.items() if not name.endswith("scale2")
            and "weight_scale" not in name and "weight_global_scale" not in name}  # fmt: skip


def make_twin(folder: Path, twin: Path) -> None:
    shutil.copytree(folder, twin)
    (twin / "hf_quant_config.json").unlink(missing_ok=True)
    config = json.loads((twin / "config.json").read_text())
    config.pop("quantization_config", None)
    (twin / "config.json").write_text(json.dumps(config))
    for file in twin.glob("*.safetensors"):
        save_file(plain(load_file(file)), file, metadata={"format": "pt"})


def check_against_twin(folder: Path, twin: Path, case: str, **options: Any) -> Engine:
    oracle = Oracle(twin)
    engine = Engine(folder, max_model_len=256, **options)
    ids = prompt(103)
    (found,) = engine.prompt_logprobs([ids])
    oracle.answer(ids).check(found, slice(0, -1), case)
    (tokens,) = engine.greedy([ids], 12)
    oracle.assert_greedy(ids, tokens)
    return engine


@pytest.mark.parametrize("case", CASES)
def test_converted_equals_its_plain_twin(case: str, tmp_path: Path) -> None:
    """What `convert` writes of plain weights serves, and equals what it makes of that in fp32."""
    write_tiny(tmp_path / "plain", dtype="float32", layers=3)
    convert(tmp_path / "plain", tmp_path / "quantised", *CASES[case])
    convert(tmp_path / "quantised", tmp_path / "twin", "fp32")
    check_against_twin(tmp_path / "quantised", tmp_path / "twin", case)


@pytest.mark.parametrize("case", CASES)
def test_equals_its_plain_twin(case: str, tmp_path: Path) -> None:
    weights, layout = CASES[case]
    folder = tmp_path / "quantised"
    write_tiny(folder, dtype="float32", weights=weights, layout=layout)
    make_twin(folder, tmp_path / "twin")
    # Drafting reads MTP tensors, which are plain, though ModelOpt's list does not say so.
    drafts = layout == "modelopt"
    spec = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}} if drafts else {}
    engine = check_against_twin(folder, tmp_path / "twin", case, **spec)
    assert (engine.counter("vllm:spec_decode_num_draft_tokens") > 0) is drafts

    def sizes(model: Any) -> list[int]:
        """Bytes of one number of every sparse layer's routed experts, times two."""
        held = (layer.mlp.experts.routed_experts for layer in model.model.layers[1:])
        full = 8 * 128 * 128  # experts, gate and up rows, columns
        return [2 * stack.w13_weight.nbytes // full for stack in held]

    # The first sparse layer is plain; the others stay as small as their files.
    small = 2 if weights == "fp8" else 1
    assert engine.on_model(sizes) == [8, small, small]


def test_arranged_codes_answer_as_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's kernel wants, by the contract here: loaded, served, drafted, checked."""
    monkeypatch.setattr(experts, "ARRANGES", (("reference",),))
    folder = tmp_path / "quantised"
    sizes = {"layers": 3, "intermediate_size": 128}
    write_tiny(folder, dtype="float32", weights="nvfp4", layout="modelopt", **sizes)
    make_twin(folder, tmp_path / "twin")
    asked = {"inkling_portable": {"routed_experts": "reference"}}
    engine = check_against_twin(folder, tmp_path / "twin", "arranged", additional_config=asked)
    own = engine.on_model(lambda model: [
        (layer.format, bool(layer.routed_experts.arranged)) for layer in model.modules()
        if isinstance(layer, experts.OwnExperts)
    ])  # fmt: skip
    assert own == [("bf16", False), ("nvfp4-arranged", True)]
    line = engine.on_model(lambda model: self_check.check(model, model.vllm_config))
    assert line is not None and "agree with their contracts" in line
