"""Options of the engine that this model cannot honour: each is refused at start, none ignored.

vLLM itself would take most of these and go on: with keys that attention never sees, with a step
taken for a dummy run, with experts that nobody moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inkling_portable.model.config import ConfigError


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
        count = getattr(parallel, f"{name}_context_parallel_size", 1)
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
