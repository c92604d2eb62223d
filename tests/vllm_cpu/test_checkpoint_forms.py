"""Other forms of a checkpoint: Hugging Face names and dialect, bfloat16, shards, other ratios."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inkling_portable.commands.tiny import write_tiny
from tests import hf_oracle
from tests.vllm_cpu.conftest import LARGEST_BOUND, Engine, Oracle, prompt


@pytest.fixture(scope="module")
def hugging_face(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared checkpoint under the names and the config keys of transformers' own classes."""
    folder = tmp_path_factory.mktemp("hf")
    model, _ = hf_oracle.load(checkpoint)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()},
              folder / "model.safetensors")  # fmt: skip
    config = {**model.config.to_dict(), "architectures": ["InklingForCausalLM"]}
    assert config["model_type"] == "inkling_text"
    assert config["moe_intermediate_size"] < config["intermediate_size"]
    assert "dense_intermediate_size" not in config
    (folder / "config.json").write_text(json.dumps(config, default=str))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(checkpoint / name, folder)
    return folder


def test_hugging_face_names_and_dialect(hugging_face: Path, oracle: Oracle) -> None:
    names = json.loads((hugging_face / "config.json").read_text())
    assert {"layer_types", "mlp_layer_types"} <= names.keys()
    engine = Engine(hugging_face)
    ids = prompt(103)
    (found,) = engine.prompt_logprobs([ids])
    oracle.answer(ids).check(found, slice(0, -1), "Hugging Face names")


def test_bfloat16(tmp_path: Path) -> None:
    # Random models are near ties in routing, where one rounding flips an expert, so the errors
    # are compared on average and not at their worst.
    write_tiny(tmp_path, preset="text", dtype="bfloat16", force=True)
    engine = Engine(tmp_path, dtype="bfloat16")
    assert engine.on_model(lambda m: m.model.layers[1].mlp.gate.bias.dtype) == torch.float32
    ids = prompt(103)
    (found,) = engine.prompt_logprobs([ids])
    truth, eager = (
        hf_oracle.logits(hf_oracle.load(tmp_path, dtype)[0], ids).double().log_softmax(-1)[:-1]
        for dtype in (torch.float64, torch.bfloat16)
    )
    own = (eager - truth).abs().mean()
    assert (found.double() - truth).abs().mean() <= 2 * own


def test_shards(tmp_path: Path, oracle: Oracle) -> None:
    # The same weights as the shared checkpoint, which is one file.
    write_tiny(tmp_path, preset="text", dtype="float32", shard_mb=0.3)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) >= 4
    ids = prompt(103)
    (found,) = Engine(tmp_path).prompt_logprobs([ids])
    oracle.answer(ids).check(found, slice(0, -1), "shards")


def test_ratios_of_the_large_model(tmp_path: Path) -> None:
    # Five local layers with twice the KV heads of the global one, two dense, six experts of 16.
    write_tiny(tmp_path, preset="large-like", dtype="float32", layers=6, towers=False, mtp_depths=0)
    ids = prompt(103)
    (found,) = Engine(tmp_path).prompt_logprobs([ids])
    answer = Oracle(tmp_path).answer(ids)
    # At this width, float32 costs transformers itself somewhat more than the bound of all others.
    own = (answer.single.double() - answer.double)[:-1].abs().max().item()
    error = (found.double() - answer.double[:-1]).abs().max().item()
    assert error <= min(2 * own, 3 * LARGEST_BOUND), f"{error:.2e} from float64, eager {own:.2e}"
