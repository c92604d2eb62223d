"""Before the server is ready: every kernel that a step can launch is launched once.

Triton compiles a kernel at its first launch with new constants, and a first request would wait for
that. What these constants are follows from the bound caches and from host integers (rows, requests,
bounds on lengths), so steps of every kind run here through one layer of each kind as soon as the
engine has bound the last cache: before CUDA graphs are captured, on every runner, eager or not.
Nothing is written, since every row is padding; what is computed is thrown away.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch
from torch import nn

from inkling_portable.compile_ahead import compiled_ahead
from inkling_portable.model.attention import AttentionMetadata, InklingAttention
from inkling_portable.model.engine import (
    CacheLayer,
    VllmConfig,
    logger,
    most_rows,
    on_accelerator,
    set_forward_context,
)
from inkling_portable.model.lora import left_out
from inkling_portable.model.self_check import LEAST_PAGES, check
from inkling_portable.model.short_conv import ConvMetadata, ConvState
from inkling_portable.model.warm_up_steps import (
    Bounds,
    Call,
    Step,
    steps_of_attention,
    steps_of_layers,
)


def bounds_of(vllm_config: VllmConfig) -> Bounds:
    """What the engine's settings allow in one step."""
    spec = vllm_config.speculative_config
    return Bounds(
        most_rows(vllm_config),
        vllm_config.scheduler_config.max_num_seqs,
        1 + ((spec.num_speculative_tokens or 0) if spec is not None else 0),
        vllm_config.model_config.max_model_len,
    )


def when_bound(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Run `warm_up(model)`, and the self-check once, when the engine has bound the last of its
    caches; nothing on a CPU."""
    if not on_accelerator():
        return
    caches = [module for module in model.modules() if isinstance(module, CacheLayer)]
    done: set[Any] = set()

    def bound() -> None:
        layout = tuple((c.kv_cache.shape[1:], c.kv_cache.stride()) for c in caches)
        if not all(c.kv_cache.numel() for c in caches):
            return
        with left_out(model):
            if layout not in done:
                done.add(layout)
                warm_up(model, vllm_config)
            if "checked" not in done and all(c.kv_cache.shape[0] >= LEAST_PAGES for c in caches):
                done.add("checked")
                check(model, vllm_config)

    for cache in caches:
        cache.when_bound = bound


@torch.inference_mode()
def warm_up(model: Any, vllm_config: VllmConfig, bounds: Bounds | None = None) -> None:
    """Launch every kernel that a step of `model` (the target or the draft) can launch.

    Its `warm_up_calls()` are the parts that run: those that are ours alone once to compile, side by
    side, and then all of them in earnest.
    """
    began = time.monotonic()
    bounds = bounds or bounds_of(vllm_config)
    calls = [call for call in model.warm_up_calls() if not call.engine or _alone(vllm_config)]
    target = model.settings.target
    if target.lib("triton") is not None and target.vendor != "cpu":
        threads = max(1, min(16, (os.cpu_count() or 1) // model.settings.tp))
        with compiled_ahead(threads):
            _run(model, [call for call in calls if not call.engine], vllm_config, bounds)
    compiled = time.monotonic()
    _run(model, calls, vllm_config, bounds)
    device = next(model.parameters()).device
    if device.type == "cuda":
        # What the largest steps took counts as the engine's, not as ours.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    logger.info(
        "inkling_portable: kernels of %s are ready after %.1f s, %.1f of them to compile",
        type(model).__name__, time.monotonic() - began, compiled - began,
    )  # fmt: skip


def _run(model: Any, calls: list[Call], vllm_config: VllmConfig, bounds: Bounds) -> None:
    device = next(model.parameters()).device
    hidden, dtype = model.settings.text.hidden_size, model.settings.dtype
    for step in steps_of_layers(bounds):
        rows = torch.zeros(step.rows, hidden, dtype=dtype, device=device)
        ids = torch.zeros(step.rows, dtype=torch.int64, device=device)
        for call in calls:
            with _step(call.caches, step, vllm_config, device):
                call.run(ids, ids, rows)
    # Layers of one geometry launch the same.
    for layer in {c.caches[0].geometry: c.caches[0] for c in calls if c.caches}.values():
        _warm_attention(layer, bounds, dtype, device)


def _warm_attention(
    layer: InklingAttention, bounds: Bounds, dtype: torch.dtype, device: torch.device
) -> None:
    """The op alone: what comes before it depends on the rows only."""
    sizes, page = layer.geometry, layer.kv_cache.shape[2]
    steps = steps_of_attention(bounds)
    for (rows, requests, fresh), alike in groupby(steps, lambda s: (s.rows, s.requests, s.fresh)):
        q = torch.zeros(rows, layer.heads, sizes.head_dim, dtype=dtype, device=device)
        rel = torch.zeros(rows, layer.heads, sizes.extent, dtype=dtype, device=device)
        q_starts, kv_lens, pages = _requests(rows, requests, fresh, page, device)
        for step in alike:
            layer.ops.rel_attention(
                q, layer.keys, layer.values, rel, pages, q_starts, kv_lens, fresh, step.longest,
                sizes.window, sizes.scale, torch.empty_like(q),
            )  # fmt: skip


def _alone(vllm_config: VllmConfig) -> bool:
    """Whether the engine's experts may run here: not where other data-parallel ranks take part."""
    parallel = vllm_config.parallel_config
    return parallel.data_parallel_size == 1 and not getattr(parallel, "enable_eplb", False)


def _step(
    caches: tuple[CacheLayer, ...], step: Step, vllm_config: VllmConfig, device: torch.device
) -> AbstractContextManager[None]:
    """A forward pass over the step as the builders would describe it, with slot -1 everywhere."""
    slots = torch.full((step.rows,), -1, dtype=torch.int64, device=device)
    found: dict[str, Any] = {}
    for layer in caches:
        page = layer.kv_cache.shape[2]
        q_starts, kv_lens, pages = _requests(step.rows, step.requests, step.fresh, page, device)
        if isinstance(layer, ConvState):
            # Valid before anything has run: an op of plain torch reads them while others compile.
            sources = slots.new_full((step.rows, layer.taps - 1), -1)
            rows_of = slots.new_zeros(layer.cells, dtype=torch.int32)
            layer.ops.conv_sources(q_starts, kv_lens, pages, slots, page, rows_of, sources)
            found[layer.prefix] = ConvMetadata(slots, sources)
        else:
            found[layer.prefix] = AttentionMetadata(
                pages, q_starts, kv_lens, slots, step.fresh, step.longest
            )
    context: AbstractContextManager[None] = set_forward_context(
        found, vllm_config, num_tokens=step.rows
    )
    return context


def _requests(
    rows: int, requests: int, fresh: int, page: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_starts, kv_lens and pages of requests that take up to `fresh` rows each."""
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * fresh
    q_starts = starts.clamp_max(rows)
    pages = torch.zeros(requests, -(-fresh // page) + 1, dtype=torch.int32, device=device)
    return q_starts, q_starts[1:] - q_starts[:-1], pages
