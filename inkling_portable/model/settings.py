"""What is settled before a layer is built: the description, the facts and the resolved ops."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from inkling_portable import self_test
from inkling_portable.model.config import (
    AttentionGeometry,
    ConfigError,
    InklingConfig,
    TextConfig,
)
from inkling_portable.model.engine import (
    VllmConfig,
    checkpoint_folder,
    cpu_group,
    expert_parallel_size,
    gather_from_ranks,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    most_rows,
    tp_group_name,
)
from inkling_portable.model.loading import ALONE, Ranks, read_headers
from inkling_portable.model.quant_layouts import Layout
from inkling_portable.model.ranks import agreed, gather
from inkling_portable.model.skinny import check_skinny_request
from inkling_portable.model.unsupported import check
from inkling_portable.model.weight_format import (
    Quantisation,
    agree,
    read_block,
    rounded_at_start,
)
from inkling_portable.registry import (
    MODELS,
    Facts,
    Resolved,
    SelectionError,
    resolve,
    switches,
)
from inkling_portable.target import Target


@dataclass(frozen=True)
class Settings:
    """Shared by all layers of one model (target or draft)."""

    config: InklingConfig
    facts: Facts
    requests: tuple[tuple[str, str], ...]
    dtype: torch.dtype
    tp: int
    rank: int
    group: str
    allow_nonfinite: bool
    target: Target
    self_test: self_test.Outcome
    quantisation: Quantisation = field(default_factory=Quantisation)
    stored: frozenset[str] = frozenset()
    """Names of the checkpoint's tensors; empty where they are not known before they come."""
    engine_quant: Any = None
    """The engine's quantisation config, for experts that are its own."""

    @property
    def text(self) -> TextConfig:
        return self.config.text

    @property
    def ranks(self) -> Ranks:
        """Those that load a checkpoint together."""
        return Ranks(self.rank, gather_from_ranks) if self.tp > 1 else ALONE

    def ops(self, page_size: int = 0) -> Resolved:
        """The ops, once more when a cache is bound: some choices depend on its page size."""
        return resolve(self.target, replace(self.facts, page_size=page_size), dict(self.requests))

    @property
    def linear_quant(self) -> Any:
        """The engine's quantisation config for linear layers, which it may round at start.

        Matrices that are stored in FP8 become plain while they are loaded: a layer's parts need not
        all be quantised then, and lists that forget some of them do no harm.
        """
        return None if self.quantisation.layout is not None else self.engine_quant

    def expert_format(self, layer: int) -> str:
        """The number format of one layer's routed experts."""
        return self.quantisation.experts_format(layer, self.text.num_experts, self.stored)

    def expert_layout(self, layer: int) -> Layout | None:
        """How the routed experts of a layer are stored; None for plain tensors."""
        plain = self.expert_format(layer) == "bf16"
        return None if plain else self.quantisation.layout

    def expert_ops(self, format: str) -> Resolved:
        """The ops for a layer whose routed experts have this format.

        A provider is asked for with the checkpoint's format in mind: one that does not serve the
        layers kept in another (the first sparse one is stored in BF16) leaves those to the default.
        """
        facts, requests = replace(self.facts, weights=format), dict(self.requests)
        try:
            return resolve(self.target, facts, requests)
        except SelectionError:
            if format == self.facts.weights:
                raise
            requests.pop("routed_experts", None)
            return resolve(self.target, facts, requests)

    def chosen(self) -> dict[str, tuple[str, ...]]:
        """Providers that serve each op, in the order in which they are tried."""
        out: dict[str, tuple[str, ...]] = {}
        for decision in self.ops().decisions:
            if decision.verdict == "chosen":
                out[decision.op] = (*out.get(decision.op, ()), decision.provider)
        return out

    def together(self, op: str, *parts: str) -> bool:
        """Whether `op` serves in place of `parts`: a function, of whoever has all of these, or has
        all but those that are Triton's, of which it is composed, without being asked for."""
        chosen, asked = self.chosen(), dict(self.requests)
        beside = ("triton",) if chosen[op] == ("wgmma",) else chosen[op]
        return getattr(self.ops(), op) is not None and all(
            chosen[part] == chosen[op] or (chosen[part] == beside and part not in asked)
            for part in parts
        )

    def per_rank(self, geometry: AttentionGeometry) -> tuple[int, int]:
        """(query heads, KV heads) of one rank."""
        return geometry.heads // self.tp, geometry.rank_kv_heads(self.tp)


def settle(vllm_config: VllmConfig, config: InklingConfig) -> Settings:
    """Read everything that the layers need to know from the engine's config.

    Raises what `unsupported.check` raises, ConfigError for a number format that is not known, and
    SelectionError for a request that cannot be obeyed.
    """
    tp = get_tensor_model_parallel_world_size()
    requests, allow_nonfinite = check(vllm_config, config, tp)
    quantisation = _quantisation(vllm_config)
    known = _stored(vllm_config) if quantisation.layout is not None else frozenset()
    target = Target.detect()
    facts = _facts(vllm_config, config.text, tp, quantisation.format)
    check_skinny_request(requests, facts.lora, facts.batch_invariant)
    asked = tuple(sorted(requests.items()))
    outcome = self_test.run(target, facts, asked)
    facts = replace(facts, failed=outcome.failed)
    if tp > 1:
        facts = agreed(target, facts, asked, tp_group_name(), partial(gather, group=cpu_group()))
    return Settings(
        config=config,
        facts=facts,
        requests=asked,
        quantisation=quantisation,
        stored=known,
        engine_quant=vllm_config.quant_config,
        dtype=vllm_config.model_config.dtype,
        tp=tp,
        rank=get_tensor_model_parallel_rank(),
        group=tp_group_name(),
        allow_nonfinite=allow_nonfinite,
        target=target,
        self_test=outcome,
    )


def _quantisation(vllm_config: VllmConfig) -> Quantisation:
    """From the checkpoint's block, or from what the engine was asked to round at start."""
    config = vllm_config.model_config.hf_config
    block = getattr(config, "quantization_config", None)
    if block is None:
        return rounded_at_start(vllm_config.quant_config)
    folder = checkpoint_folder(vllm_config)
    other = folder / "hf_quant_config.json" if folder else None
    if other is not None and other.is_file():
        try:
            agree(block, json.loads(other.read_text()))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"file {other.name} is damaged ({error}); download it again"
            ) from error
    return read_block(block)


def _stored(vllm_config: VllmConfig) -> frozenset[str]:
    folder = checkpoint_folder(vllm_config)
    return frozenset(read_headers(folder).shapes) if folder else frozenset()


def _facts(vllm_config: VllmConfig, text: TextConfig, tp: int, weights: str) -> Facts:
    kernel = getattr(vllm_config, "kernel_config", None)
    facts = Facts(
        model="custom",
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        weights=weights,
        hidden=text.hidden_size,
        heads=text.global_heads,
        kv_heads=text.global_kv_heads,
        local_heads=text.local_heads,
        local_kv_heads=text.local_kv_heads,
        head_dim=text.global_head_dim,
        d_rel=text.rel_dim,
        rel_extent=text.rel_extent,
        window=text.window,
        conv_taps=text.conv_taps,
        experts=text.num_experts,
        expert_width=text.expert_width,
        top_k=text.top_k,
        sinks=text.num_sinks,
        tp=tp,
        ep=expert_parallel_size(vllm_config),
        dp=vllm_config.parallel_config.data_parallel_size,
        pp=vllm_config.parallel_config.pipeline_parallel_size,
        lora=vllm_config.lora_config is not None,
        step_rows=most_rows(vllm_config),
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        batch_invariant=bool(int(os.environ.get("VLLM_BATCH_INVARIANT") or 0)),
        moe_backend=str(getattr(kernel, "moe_backend", None) or "auto"),
        **switches(os.environ),
    )
    for name, known in MODELS.items():
        same = ("hidden", "heads", "kv_heads", "local_heads", "local_kv_heads", "expert_width")
        if all(getattr(facts, field) == getattr(known, field) for field in same):
            return replace(facts, model=name)
    return facts
