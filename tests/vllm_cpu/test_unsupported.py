"""Options of vLLM that the model cannot honour are sentences; those that it can are not.

vLLM's own config is made for each, as its command line makes it, and no engine is started.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inkling_portable import plugin
from inkling_portable.model.config import ConfigError
from inkling_portable.model.unsupported import check, check_options, refusals
from inkling_portable.registry import SelectionError

MTP = {"method": "mtp", "num_speculative_tokens": 2}
INKLING = SimpleNamespace(model_type="inkling_text")


def config(folder: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder), dtype="float32", max_model_len=512, **options
    ).create_engine_config()


ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "offload": ({"cpu_offload_gb": 1}, "found --cpu-offload-gb .* narrower weights"),
    "prefetch": ({"offload_group_size": 2}, "or --offload-group-size; use more ranks"),
    "backend": (
        {"attention_backend": "FLASH_ATTN"},
        "found --attention-backend FLASH_ATTN; leave it out, or set INKLING_PORTABLE=rel_attention",
    ),
    "one cache": (
        {"disable_hybrid_kv_cache_manager": True},
        "need the hybrid cache manager; found it disabled, by --disable-hybrid-kv-cache-manager",
    ),
    "connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "whose connector moves one kind of cache; leave it out, or use NixlConnector",
    ),
    "draft cache": (
        {"speculative_config": MTP | {"kv_cache_dtype": "fp8"}},
        "found kv_cache_dtype fp8 in --speculative-config; set --kv-cache-dtype for both",
    ),
    "parallel drafts": (
        {"speculative_config": MTP | {"parallel_drafting": True}},
        "found parallel_drafting in --speculative-config; leave it out",
    ),
    "runner": ({"runner": "pooling"}, "found --runner pooling; leave it out"),
    "window": ({"disable_sliding_window": True}, "found --disable-sliding-window; leave it out"),
    "stages": (
        {"pipeline_parallel_size": 5},
        "stage needs a layer; found --pipeline-parallel-size 5 and 4 layers; use at most 4 stages",
    ),
    "cache type": ({"kv_cache_dtype": "fp8_e5m2"}, "found --kv-cache-dtype fp8_e5m2; use auto"),
    "too many drafts": (
        {"speculative_config": MTP | {"num_speculative_tokens": 4}},
        "the checkpoint has 2; set num_speculative_tokens to at most 2",
    ),
    "request": (
        {"additional_config": {"inkling_portable": {"route": "cutlass"}}},
        "asks for route=cutlass, but route is offered by",
    ),
    "setting": (
        {"additional_config": {"inkling_portable": {"allow_nonfinite": 1}}},
        "needs true or false for allow_nonfinite; found 1",
    ),
    "ranks": ({"tensor_parallel_size": 3}, "parallel size 3 needs num_attention_heads"),
}
"""Given on vLLM's command line, and what is said. vLLM accepts most by itself."""

LATE = ("connector",)
"""What vLLM concludes when all else is known."""

SET: dict[str, tuple[dict[str, Any], tuple[str, str, Any], str]] = {
    "decode contexts": (
        {}, ("parallel_config", "decode_context_parallel_size", 2),
        "found --decode-context-parallel-size 2; use --tensor-parallel-size",
    ),
    "prefill contexts": (
        {}, ("parallel_config", "prefill_context_parallel_size", 2),
        "found --prefill-context-parallel-size 2; use --tensor-parallel-size",
    ),
    "EPLB": (
        {}, ("parallel_config", "enable_eplb", True),
        "stay on the rank that loaded them; found --enable-eplb",
    ),
    "routed": (
        {}, ("aux_output_config", "enable_return_routed_experts", True),
        "found --enable-return-routed-experts; leave it out",
    ),
    "three batches": (
        {}, ("parallel_config", "ubatch_size", 3),
        "found 3 microbatches; leave out --enable-dbo",
    ),
    "two batches": ({}, ("parallel_config", "enable_dbo", True), "found 2 microbatches"),
    "elastic": ({}, ("parallel_config", "enable_elastic_ep", True), "or --enable-elastic-ep; use"),
    "float32 adapters": (
        {"enable_lora": True}, ("device_config", "device_type", "cuda"),
        "found --enable-lora with float32; set --dtype bfloat16",
    ),
    "stages with drafts": (
        {"speculative_config": MTP}, ("parallel_config", "pipeline_parallel_size", 2),
        "found --pipeline-parallel-size 2; use --tensor-parallel-size, or draft with another",
    ),
}  # fmt: skip
"""What vLLM takes on other machines only: a field of the config, set afterwards."""


@pytest.mark.parametrize("case", [case for case in ASKED if case not in LATE])
def test_refused_before_an_engine_starts(checkpoint: Path, case: str) -> None:
    options, sentence = ASKED[case]
    with pytest.raises(ValueError, match=sentence):
        config(checkpoint, **options)


@pytest.mark.parametrize("case", LATE)
def test_refused_when_a_model_is_made(checkpoint: Path, case: str) -> None:
    options, sentence = ASKED[case]
    made = config(checkpoint, **options)
    with pytest.raises(ConfigError, match=sentence):
        check_options(made)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [("garbage", "INKLING_PORTABLE='garbage' is not understood at 'garbage'; write off, "),
     ("route=cutlass", "INKLING_PORTABLE asks for route=cutlass, but route is offered by ")],
)  # fmt: skip
def test_a_request_is_read_when_the_plugin_is_loaded(
    monkeypatch: pytest.MonkeyPatch, asked: str, sentence: str
) -> None:
    monkeypatch.setenv("INKLING_PORTABLE", asked)
    with pytest.raises(SelectionError, match=sentence):
        plugin.register()


def test_a_stage_without_layers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "0, 4")
    with pytest.raises(ValueError, match="size 2 with VLLM_PP_LAYER_PARTITION=0,4 and 4 layers"):
        config(checkpoint, pipeline_parallel_size=2)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    config(checkpoint, pipeline_parallel_size=2)


def test_another_quantisation_than_that_of_the_checkpoint() -> None:
    """On a CPU, where vLLM's classes are not asked, whose mismatch would stop it elsewhere."""
    block, ours = {"quant_method": "modelopt"}, plugin.own_quantisation()
    asked = partial(ours.override_quantization_method, block, hf_config=INKLING)
    assert asked(None) == asked("modelopt_fp4") == asked(ours.get_name()) == ours.get_name()
    with pytest.raises(ValueError, match="stored by modelopt; found --quantization awq; leave it"):
        asked("awq")


@pytest.mark.parametrize("case", SET)
def test_refused_elsewhere(checkpoint: Path, case: str) -> None:
    options, (owner, name, value), sentence = SET[case]
    made = config(checkpoint, **options)
    assert list(refusals(made)) == [] and hasattr(getattr(made, owner), name)
    setattr(getattr(made, owner), name, value)
    with pytest.raises(ConfigError, match=sentence):
        check_options(made)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative_config": MTP},
        {"enable_lora": True, "max_loras": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                "prompt_lookup_max": 3}},
        {"kv_cache_dtype": "fp8", "speculative_config": MTP},
        {"enforce_eager": True, "enable_prefix_caching": False, "scheduling_policy": "priority"},
    ],
    ids=["none", "drafts", "adapters", "ngram", "8-bit cache with drafts", "others"],
)  # fmt: skip
def test_accepted(checkpoint: Path, options: dict[str, Any]) -> None:
    assert list(refusals(config(checkpoint, **options))) == []


def test_the_model_asks(checkpoint: Path) -> None:
    from inkling_portable.model import settings

    assert settings.check is check


def test_parameters_without_memory() -> None:
    """As vLLM makes them for rounding at start: what is copied there is lost without a word."""
    from torch import nn

    from inkling_portable.model import loading
    from inkling_portable.model.checkpoint import CheckpointError

    with pytest.raises(CheckpointError, match=r"rounding \(--quantization\); .* store that format"):
        loading.load(nn.Linear(2, 2, device="meta"), [], {}, loading.Files(), False)


def test_explain_knows_the_engines_expert_backends() -> None:
    from typing import get_args

    from vllm.config.kernel import MoEBackend

    from inkling_portable.commands.explain import MOE_BACKENDS

    assert set(get_args(MoEBackend)) <= set(MOE_BACKENDS)
