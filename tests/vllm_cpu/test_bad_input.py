"""Bad checkpoints, configs and requests: each a sentence, at start or on the request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkling_portable.model.engine import MetadataBuilder
from tests.vllm_cpu.conftest import Engine, Oracle, prompt

WEIGHTS = "model.safetensors"
NORM = "model.llm.layers.2.attn.k_norm.weight"
EXPERTS = "model.llm.layers.1.mlp.experts.w2_weight"


@pytest.fixture
def spoilt(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, for a test to spoil."""
    folder = tmp_path / "spoilt"
    shutil.copytree(checkpoint, folder)
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        known = dict.fromkeys(tensors, WEIGHTS)
        index.write_text(json.dumps({"metadata": {}, "weight_map": known}))


def start(folder: Path, **options: Any) -> Engine:
    return Engine(folder, max_model_len=256, **options)


def refused(folder: Path, sentence: str, **options: Any) -> None:
    with pytest.raises(Exception, match=sentence):
        start(folder, **options)


def test_missing_tensor(spoilt: Path) -> None:
    edit_tensors(spoilt, lambda tensors: tensors.pop(NORM))
    refused(spoilt, rf"tensor {NORM} is missing from the checkpoint \(.*{WEIGHTS}\)")


def test_extra_tensor(spoilt: Path) -> None:
    edit_tensors(spoilt, lambda tensors: tensors.update({f"{NORM}.scale": torch.ones(1)}))
    refused(spoilt, rf"tensor {NORM}\.scale in {WEIGHTS} is not part of this model")


def test_wrong_shape(spoilt: Path) -> None:
    edit_tensors(spoilt, lambda tensors: tensors.update({NORM: torch.ones(31)}))
    refused(spoilt, rf"tensor {NORM} in {WEIGHTS} needs shape \[32\]; found \[31\]")


def test_truncated_file(spoilt: Path) -> None:
    whole = (spoilt / WEIGHTS).read_bytes()
    (spoilt / WEIGHTS).write_bytes(whole[:-1000])
    refused(spoilt, rf"file {WEIGHTS} is cut off inside tensor model\.llm\.")


def test_file_cut_off_in_its_header(spoilt: Path) -> None:
    whole = (spoilt / WEIGHTS).read_bytes()
    (spoilt / WEIGHTS).write_bytes(whole[:100])
    refused(spoilt, rf"file {WEIGHTS} is cut off inside its header")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite(spoilt: Path, value: float) -> None:
    edit_tensors(spoilt, lambda tensors: tensors[EXPERTS][7, 127, 63].fill_(value))
    refused(spoilt, rf"tensor {EXPERTS} in {WEIGHTS} has NaN or infinite values.*allow_nonfinite")


def test_weights_that_are_not_finite_can_be_allowed(
    spoilt: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_tensors(spoilt, lambda tensors: tensors[EXPERTS][7, 127, 63].fill_(float("inf")))
    engine = start(spoilt, additional_config={"inkling_portable": {"allow_nonfinite": True}})
    warnings = [r for r in caplog.records if "NaN or infinite" in r.message]
    assert len(warnings) == 1
    assert EXPERTS in warnings[0].message
    assert len(engine.greedy([prompt(5)], 3)[0]) == 3


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        config.pop(name, None)
        if value is not ...:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_attention_heads": ...}, "num_attention_heads in config.json is missing"),
        ({"moe_intermediate_size": 96}, "moe_intermediate_size in config.json is 96"),
        ({"local_layer_ids": [0, 1, 4]}, r"local_layer_ids in config.json is \[0, 1, 4\]"),
        ({"swa_num_key_value_heads": 3}, "make it a multiple of swa_num_key_value_heads"),
    ],
)
def test_bad_config(spoilt: Path, changes: dict[str, Any], sentence: str) -> None:
    edit_config(spoilt, **changes)
    refused(spoilt, sentence)


def test_a_cache_type_that_attention_cannot_read(checkpoint: Path) -> None:
    refused(checkpoint, "found --kv-cache-dtype fp8_e5m2; use", kv_cache_dtype="fp8_e5m2")


def test_too_long_a_prompt(engines: Callable[..., Engine], oracle: Oracle) -> None:
    engine = engines(block_size=16)
    with pytest.raises(Exception, match="maximum context length is 1024"):
        engine.greedy([prompt(1025)], 1)
    check_alive(engine, oracle)


def test_a_request_cancelled_in_mid_stream(engines: Callable[..., Engine], oracle: Oracle) -> None:
    from vllm import SamplingParams

    engine = engines(block_size=16)
    core = engine.llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    core.add_request("cancelled", {"prompt_token_ids": prompt(50)}, params)
    for _ in range(4):
        core.step()
    assert core.has_unfinished_requests()
    core.abort_request(["cancelled"])
    assert not core.has_unfinished_requests()
    check_alive(engine, oracle)


def check_alive(engine: Engine, oracle: Oracle) -> None:
    ids = prompt(33)
    oracle.assert_greedy(ids, engine.greedy([ids], 4)[0])


def test_a_block_table_without_room_for_a_step_is_refused() -> None:
    """Kernels would read the next request's pages; here an engine says that it needs 65 tokens."""
    layer = SimpleNamespace(prefix="layers.0.attn", kv_cache=torch.zeros(9, 1, 16, 8))
    builder = cast(MetadataBuilder, SimpleNamespace(layers=[layer]))
    step = Mock(block_table_tensor=torch.zeros(2, 4, dtype=torch.int32), max_seq_len=64)
    assert MetadataBuilder.table(builder, step) is step.block_table_tensor
    step.max_seq_len = 65
    with pytest.raises(ValueError, match=r"layers\.0\.attn needs a block table for 65 tokens; fo"):
        MetadataBuilder.table(builder, step)
