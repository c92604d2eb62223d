"""Before the server is ready: every kernel that a step can launch is launched once.

Triton compiles a kernel at its first launch with new constants, and a first request would wait for
that. What these constants are follows from the bound caches and from host integers (rows, requests,
bounds on lengths), so steps of every kind run here through one layer of each kind as soon as the
engine has bound the last cache: before CUDA graphs are captured, on every runner, eager or not.
Nothing is written, since every row is padding; what is computed is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inkling_portable.model.attention import AttentionMetadata, InklingAttention
from inkling_portable.model.engine import (
    CacheLayer,
    VllmConfig,
    logger,
    most_rows,
    on_accelerator,
    set_forward_context,
)
from inkling_portable.model.experts import MoE
from inkling_portable.model.short_conv import ConvMetadata, ConvState

EACH_TO = 80
"""Up to so many rows every count runs: the tuning of small steps has most of its steps there."""


@dataclass(frozen=True)
class Bounds:
    """What the engine's settings allow in one step."""

    rows: int  # padding and drafts included
    requests: int
    fresh: int  # new tokens of a decoding request: drafts and one
    length: int  # tokens of one request

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Bounds:
        spec = vllm_config.speculative_config
        return cls(
            most_rows(vllm_config),
            vllm_config.scheduler_config.max_num_seqs,
            1 + ((spec.num_speculative_tokens or 0) if spec is not None else 0),
            vllm_config.model_config.max_model_len,
        )


@dataclass(frozen=True)
class Call:
    """A part of a model: `run(ids [T], positions [T], rows [T, H])`, the two cache layers whose
    metadata it reads, and the MLP in it, if any."""

    run: Callable[[Tensor, Tensor, Tensor], Any]
    caches: tuple[InklingAttention, ConvState] | tuple[()] = ()
    mlp: nn.Module | None = None


@dataclass(frozen=True)
class Step:
    """`requests` with up to `fresh` new tokens each, `rows` in all; none is longer than `longest`,
    the host's bound, which a captured graph sets to the longest context that is allowed."""

    rows: int
    requests: int
    fresh: int
    longest: int


def row_counts(most: int) -> list[int]:
    """Rows of the steps that run: each small count, then powers of two and what lies between."""
    counts = set(range(1, min(most, EACH_TO) + 1)) | {most}
    power = 64
    while power < most:
        counts |= {power - 1, power, power + 1, power + power // 2}
        power *= 2
    return sorted(count for count in counts if count <= most)


def geometric(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... below last, and last."""
    found = []
    while first < last:
        found.append(first)
        first *= factor
    return [*found, last]


def steps_of_layers(bounds: Bounds) -> Iterator[Step]:
    """One step for each row count."""
    for rows in row_counts(bounds.rows):
        requests = min(rows, bounds.requests)
        yield Step(rows, requests, min(-(-rows // requests), bounds.length), bounds.length)


def steps_of_attention(bounds: Bounds) -> Iterator[Step]:
    """What attention plans by: requests, new tokens of the longest chunk, bound on lengths."""
    for requests in geometric(1, bounds.requests, 2):
        most = min(bounds.rows, bounds.length)
        chunks = {*range(1, bounds.fresh + 1), *geometric(1, most, 2), most - most // 4}
        for fresh in sorted(chunk for chunk in chunks if 0 < chunk <= most):
            # A mixed step: one chunk of `fresh`, the other requests decode.
            for rows in {min(bounds.rows, n) for n in (fresh + requests - 1, fresh * requests)}:
                for longest in geometric(max(fresh, 512), bounds.length, 4):
                    yield Step(rows, requests, fresh, max(fresh, longest))


def when_bound(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Run `warm_up(model)` when the engine has bound the last of its caches; nothing on a CPU."""
    if not on_accelerator():
        return
    caches = [module for module in model.modules() if isinstance(module, CacheLayer)]
    done: set[tuple[Any, ...]] = set()

    def bound() -> None:
        layout = tuple((c.kv_cache.shape[1:], c.kv_cache.stride()) for c in caches)
        if all(c.kv_cache.numel() for c in caches) and layout not in done:
            done.add(layout)
            warm_up(model, vllm_config)

    for cache in caches:
        cache.when_bound = bound


@torch.inference_mode()
def warm_up(model: Any, vllm_config: VllmConfig, bounds: Bounds | None = None) -> None:
    """Launch every kernel that a step of `model` (the target or the draft) can launch.

    Its `warm_up_calls()` are the parts that run.
    """
    began = time.monotonic()
    bounds, text = bounds or Bounds.of(vllm_config), model.settings.text
    device = next(model.parameters()).device
    calls = [call for call in model.warm_up_calls() if _alone(call.mlp, vllm_config)]
    for step in steps_of_layers(bounds):
        rows = torch.zeros(step.rows, text.hidden_size, dtype=model.settings.dtype, device=device)
        ids = torch.zeros(step.rows, dtype=torch.int64, device=device)
        for call in calls:
            with _step(call.caches, step, vllm_config, device):
                call.run(ids, ids, rows)
    for call in calls:
        if call.caches:
            _warm_attention(call.caches, bounds, vllm_config, device)
    if device.type == "cuda":
        # What the largest steps took counts as the engine's, not as ours.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    logger.info("inkling_portable: kernels of %s are ready after %.1f s", type(model).__name__,
                time.monotonic() - began)  # fmt: skip


def _warm_attention(
    caches: tuple[InklingAttention, ConvState], bounds: Bounds, vllm_config: VllmConfig,
    device: torch.device,
) -> None:  # fmt: skip
    layer, _ = caches
    width = sum(layer.geometry.qkvr_sizes) // layer.settings.tp
    for step in steps_of_attention(bounds):
        qkvr = torch.zeros(step.rows, width, dtype=layer.settings.dtype, device=device)
        positions = torch.zeros(step.rows, dtype=torch.int64, device=device)
        with _step(caches, step, vllm_config, device):
            layer.attend(qkvr, positions)


def _alone(mlp: nn.Module | None, vllm_config: VllmConfig) -> bool:
    """Whether an MLP may run here: not where other data-parallel ranks take part in it."""
    parallel = vllm_config.parallel_config
    return not isinstance(mlp, MoE) or (
        parallel.data_parallel_size == 1 and not getattr(parallel, "enable_eplb", False)
    )


def _step(
    caches: tuple[CacheLayer, ...], step: Step, vllm_config: VllmConfig, device: torch.device
) -> AbstractContextManager[None]:
    """A forward pass over the step as the builders would describe it, with slot -1 everywhere."""
    starts = [min(i * step.fresh, step.rows) for i in range(step.requests + 1)]
    q_starts = torch.tensor(starts, dtype=torch.int32, device=device)
    kv_lens = q_starts[1:] - q_starts[:-1]
    slots = torch.full((step.rows,), -1, dtype=torch.int64, device=device)
    found: dict[str, Any] = {}
    for layer in caches:
        page = layer.kv_cache.shape[2]
        pages = torch.zeros(
            step.requests, -(-step.fresh // page) + 1, dtype=torch.int32, device=device
        )
        if isinstance(layer, ConvState):
            sources = slots.new_empty(step.rows, layer.taps - 1)
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
