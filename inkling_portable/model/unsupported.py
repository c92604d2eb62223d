"""Options of the engine that this model cannot honour: each is refused at start, none ignored.

vLLM itself would take most of these and go on: with keys that attention never sees, with a step
taken for a dummy run, with experts that nobody moves. Asked when its config is made, before a
process of the engine starts, and again when a model is made, with what the engine settled since.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from inkling_portable.model.config import ConfigError, InklingConfig, TextConfig
from inkling_portable.registry import KV_DTYPES, SETTINGS, SelectionError, parse_overrides


def check(vllm_config: Any, config: InklingConfig, tp: int) -> tuple[dict[str, str], bool]:
    """The providers that are asked for by op, and whether values that are not finite may load.

    Raises ConfigError for a width that does not split over `tp` ranks, for an option that cannot be
    honoured and for more drafts than MTP depths, and SelectionError for an unreadable request.
    """
    config.text.check_tensor_parallel(tp)
    check_options(vllm_config)
    _check_adapters(vllm_config, config.text, tp)
    _check_drafts(vllm_config, config)
    extra = vllm_config.additional_config
    extra = extra if isinstance(extra, Mapping) else {}
    requests = parse_overrides(extra, os.environ.get("INKLING_PORTABLE"))
    block = extra.get("inkling_portable") or {}
    for name in SETTINGS:
        if not isinstance(block.get(name, False), bool):
            raise SelectionError(
                f"--additional-config needs true or false for {name}; found {block[name]!r}"
            )
    return requests, block.get("allow_nonfinite", False)


def check_options(vllm_config: Any) -> None:
    """Raise ConfigError with the first of `refusals`."""
    for sentence in refusals(vllm_config):
        raise ConfigError(sentence)


def refusals(vllm_config: Any) -> Iterator[str]:
    """A sentence for every option of a vLLM config that Inkling cannot be served with."""
    parallel, drafts = vllm_config.parallel_config, vllm_config.speculative_config
    model = vllm_config.model_config
    # What a vLLM in range does not have yet, or no longer has, is as if not asked for.
    for name in ("decode", "prefill"):
        count = getattr(parallel, f"{name}_context_parallel_size", 1) or 1  # None: not settled
        if count > 1:
            yield (
                "Inkling's attention needs a request's whole cache on its rank; found "
                f"--{name}-context-parallel-size {count}; use --tensor-parallel-size"
            )
    batches = max(2 * bool(parallel.enable_dbo), getattr(parallel, "ubatch_size", 0))
    if batches > 1:
        yield (
            "Inkling's short convolutions need all rows of a step in one batch; found "
            f"{batches} microbatches; leave out --enable-dbo and --ubatch-size"
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield (
            "Inkling's full, windowed and convolution caches need the hybrid cache manager; found "
            "it disabled, by --disable-hybrid-kv-cache-manager or by a --kv-transfer-config whose "
            "connector moves one kind of cache; leave it out, or use NixlConnector"
        )
    if parallel.enable_eplb or getattr(parallel, "enable_elastic_ep", False):
        yield (
            "Inkling's experts stay on the rank that loaded them; found --enable-eplb or "
            "--enable-elastic-ep; use --enable-expert-parallel alone"
        )
    offload = getattr(vllm_config, "offload_config", None)
    uva, prefetch = (getattr(offload, name, None) for name in ("uva", "prefetch"))
    if getattr(uva, "cpu_offload_gb", 0) or getattr(prefetch, "offload_group_size", 0):
        yield (
            "Inkling's kernels need their weights in the accelerator's memory; found "
            "--cpu-offload-gb or --offload-group-size; use more ranks or narrower weights, see "
            "`inkling-portable fit`"
        )
    if getattr(model, "disable_sliding_window", False):
        yield (
            "Inkling's local layers were trained with a window; found --disable-sliding-window; "
            "leave it out"
        )
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    if backend is not None:
        yield (
            "Inkling's attention is chosen by op; found --attention-backend "
            f"{getattr(backend, 'name', backend)}; leave it out, or set "
            "INKLING_PORTABLE=rel_attention=PROVIDER to a name that `inkling-portable explain` "
            "lists"
        )
    outputs = (model, getattr(vllm_config, "aux_output_config", None))
    if any(getattr(owner, "enable_return_routed_experts", False) for owner in outputs):
        yield (
            "Inkling's router is an op that keeps no record; found "
            "--enable-return-routed-experts; leave it out, or set INKLING_PORTABLE=off"
        )
    if getattr(model, "runner_type", "generate") != "generate":
        yield (f"Inkling is served to generate; found --runner {model.runner_type}; leave it out")
    on_gpu = getattr(vllm_config.device_config, "device_type", "") == "cuda"
    if vllm_config.lora_config is not None and on_gpu and str(model.dtype) == "torch.float32":
        yield (
            "the engine's kernels for adapters take rows of 16 bits; found --enable-lora with "
            "float32; set --dtype bfloat16"
        )
    cache = vllm_config.cache_config
    if cache.cache_dtype not in KV_DTYPES:
        yield (
            "Inkling's attention needs keys and values in bfloat16, float16, float32 or fp8 "
            f"(e4m3); found --kv-cache-dtype {cache.cache_dtype}; use auto or fp8"
        )
    if getattr(cache, "kv_cache_dtype_skip_layers", None):
        yield (
            "Inkling's layers need caches of one type; found --kv-cache-dtype-skip-layers "
            f"{' '.join(cache.kv_cache_dtype_skip_layers)}; leave it out"
        )
    if getattr(cache, "calculate_kv_scales", False):  # goes with the option, after vLLM 0.26
        yield "Inkling's 8-bit caches have scale 1; found --calculate-kv-scales; leave it out"
    stages, layers = parallel.pipeline_parallel_size, model.hf_text_config.num_hidden_layers
    split = os.environ.get("VLLM_PP_LAYER_PARTITION", "").replace(" ", "")
    if stages > layers or "0" in split.split(","):
        yield (
            f"each pipeline stage needs a layer; found --pipeline-parallel-size {stages}"
            f"{f' with VLLM_PP_LAYER_PARTITION={split}' * bool(split)} and {layers} layers; use "
            f"at most {layers} stages, each with one or more"
        )
    if drafts is None or drafts.method != "mtp":
        return
    if parallel.pipeline_parallel_size > 1:
        yield (
            "drafting by MTP depths needs embedding and head on one stage; found "
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}; use "
            "--tensor-parallel-size, or draft with another method"
        )
    own = getattr(drafts, "kv_cache_dtype", None)
    if own not in (None, "auto", vllm_config.cache_config.cache_dtype):
        yield (
            "draft depths share the target's cache groups; found kv_cache_dtype "
            f"{own} in --speculative-config; set --kv-cache-dtype for both"
        )
    if getattr(drafts, "parallel_drafting", False):
        yield (
            "an MTP depth needs the draft of the depth before; found parallel_drafting in "
            "--speculative-config; leave it out"
        )


def _check_drafts(vllm_config: Any, config: InklingConfig) -> None:
    """vLLM would take a depth for a second draft; it was trained for one distance only."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method != "mtp":
        return
    asked, depths = spec.num_speculative_tokens or 0, config.require_mtp().num_depths
    if asked > depths:
        raise ConfigError(
            f"drafting {asked} tokens in a step needs as many MTP depths; the checkpoint has "
            f"{depths}; set num_speculative_tokens to at most {depths}"
        )


def _check_adapters(vllm_config: Any, text: TextConfig, tp: int) -> None:
    """vLLM cuts an adapter's keys and values into as many parts as there are ranks."""
    heads = min(text.global_kv_heads, text.local_kv_heads)
    if vllm_config.lora_config is not None and tp > heads:
        raise ConfigError(
            f"adapters need no more tensor-parallel ranks than KV heads; found {tp} ranks and "
            f"{heads} heads; lower --tensor-parallel-size or serve without --enable-lora"
        )
