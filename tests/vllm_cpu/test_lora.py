"""Adapters on the attention projections equal weights with the adapter merged in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.vllm_cpu.conftest import Engine, Oracle, prompt

PARTS = ("wq_du", "wk_dv", "wv_dv", "wr_du")


def test_an_adapter_and_the_base_model(checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    shutil.copytree(checkpoint, merged)
    weights = load_file(merged / "model.safetensors")
    draw, deltas = torch.manual_seed(0), {}
    for name in [n for n in weights if n.endswith(tuple(f".attn.{p}.weight" for p in PARTS))]:
        rows, columns = weights[name].shape
        down = torch.randn(4, columns, generator=draw) / 20
        up = torch.randn(rows, 4, generator=draw)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        deltas |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        weights[name] = weights[name] + up @ down
    save_file(weights, merged / "model.safetensors")
    save_file(deltas, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": list(PARTS)})
    )

    engine = Engine(checkpoint, enable_lora=True, max_lora_rank=8)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    ids = prompt(60)
    base, adapted = (
        list(
            engine.llm.generate(
                [{"prompt_token_ids": ids}], params, use_tqdm=False, lora_request=request
            )[0]
            .outputs[0]
            .token_ids
        )
        for request in (None, LoRARequest("adapter", 1, str(adapter)))
    )
    assert base != adapted
    oracle.assert_greedy(ids, base)
    Oracle(merged).assert_greedy(ids, adapted)
