"""`fit` plans caches as vLLM does: the specs of our layers, put through vLLM's own planner.

The planner runs over the caches that the layers themselves declare for the released configs, with
the properties of vLLM's config that it reads; nothing of the planner is replaced.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

from inkling_portable.commands.fit_cache import CachePlan, Demand, layer_caches, plan
from inkling_portable.commands.released_configs import released
from inkling_portable.model.attention import InklingAttention
from inkling_portable.model.config import AttentionGeometry, InklingConfig, parse
from inkling_portable.model.short_conv import ConvState

GIB = 1 << 30
MEMORIES = (1 * GIB + 12345, 24 * GIB, 70 * GIB)


def engine_config(demand: Demand, block: int, kv_dtype: str) -> Any:
    """What the planner and the layers read of vLLM's config; derived values are vLLM's own."""
    speculative = None
    if demand.mtp:
        speculative = SimpleNamespace(
            method="mtp",
            use_eagle=lambda: True,
            use_multi_module_mtp=lambda: demand.mtp > 1,
            use_eagle_block_drop=lambda: False,
            num_speculative_tokens=demand.mtp,
        )
    config = SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=demand.mtp,
        use_v2_model_runner=True,
        model_config=SimpleNamespace(
            max_model_len=demand.context,
            original_max_model_len=demand.context,
            dtype=torch.bfloat16,
        ),
        scheduler_config=SimpleNamespace(
            async_scheduling=demand.steps_in_flight == 2,
            max_num_batched_tokens=demand.batch_tokens,
            disable_hybrid_kv_cache_manager=False,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, decode_context_parallel_size=1
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            block_size=block,
            cache_dtype=kv_dtype,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        kv_transfer_config=None,
    )
    for name in ("max_concurrent_batches", "max_in_flight_tokens", "num_prefill_lookahead_tokens"):
        setattr(config, name, getattr(VllmConfig, name).fget(config))
    return config


@cache
def building_config() -> VllmConfig:
    """What is current while layers are built: they register their caches in it."""
    return VllmConfig()


def declared_specs(config: InklingConfig, tp: int, mtp: int, engine: Any) -> dict[str, KVCacheSpec]:
    """The cache specs of all layers, asked of our layer classes, in the order of construction."""

    def per_rank(sizes: AttentionGeometry) -> tuple[int, int]:
        return sizes.heads // tp, sizes.kv_heads // tp

    settings: Any = SimpleNamespace(
        text=config.text, tp=tp, dtype=torch.bfloat16, per_rank=per_rank, ops=lambda page=0: None
    )
    geometries = [config.text.attention(layer) for layer in range(config.text.num_layers)]
    geometries += [config.mtp_attention(depth) for depth in range(mtp)]
    specs: dict[str, KVCacheSpec] = {}
    building = building_config()
    building.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(building):
        for index, geometry in enumerate(geometries):
            conv = ConvState(settings, geometry, f"layers.{index}.conv_state")
            specs[conv.prefix] = conv.get_kv_cache_spec(engine)
            # Its constructor makes full-size projections; the spec needs only these two.
            attention: Any = SimpleNamespace(geometry=geometry, kv_heads=per_rank(geometry)[1])
            specs[f"layers.{index}.attn"] = InklingAttention.get_kv_cache_spec(attention, engine)
    return specs


def kind_of(spec: Any) -> str:
    if isinstance(spec, FullAttentionSpec):
        return "global"
    return "conv" if spec.head_size_v == 0 else "local"


def both(
    name: str, tp: int, block: int, demand: Demand, kv_dtype: str = "auto"
) -> tuple[CachePlan, Any, dict[str, KVCacheSpec]]:
    config = parse(released(name))
    engine = engine_config(demand, block, kv_dtype)
    kv_bytes = 1 if kv_dtype == "fp8" else 2
    ours = plan(layer_caches(config, tp=tp, block=block, kv_bytes=kv_bytes, mtp=demand.mtp))
    return ours, engine, declared_specs(config, tp, demand.mtp, engine)


def check(ours: CachePlan, engine: Any, specs: dict[str, KVCacheSpec], demand: Demand) -> None:
    for memory in MEMORIES:
        if ours.blocks(memory) - 1 < ours.reserve(demand):
            # vLLM refuses to start exactly where we say that one request does not fit.
            assert ours.resident(memory, demand) == 0
            with pytest.raises(ValueError, match="KV cache"):
                kv_cache_utils.get_kv_cache_configs(engine, [dict(specs)], [memory])
            continue
        assert ours.resident(memory, demand) >= 1
        [config] = kv_cache_utils.get_kv_cache_configs(engine, [dict(specs)], [memory])
        planned = Counter(
            (kind_of(g.kv_cache_spec), g.kv_cache_spec.block_size, len(g.layer_names))
            for g in config.kv_cache_groups
        )
        assert planned == Counter((g.cache.kind, g.cache.block, g.layers) for g in ours.groups)
        assert {g.kv_cache_spec.page_size_bytes for g in config.kv_cache_groups} == {ours.page}
        assert config.num_blocks == ours.blocks(memory)
        concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(engine, config)
        assert concurrency == pytest.approx(ours.engine_concurrency(memory, demand), rel=1e-12)


@pytest.mark.parametrize("name", ["Inkling", "Inkling-Small"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("block", [16, 128])
def test_plan_equals_the_engines(name: str, tp: int, block: int) -> None:
    for demand in (Demand(131072, 8192), Demand(1048576, 2048), Demand(4096, 16384)):
        check(*both(name, tp, block, demand), demand)


@pytest.mark.parametrize("name", ["Inkling", "Inkling-Small"])
@pytest.mark.parametrize("mtp", [1, 2, 5, 8])
def test_draft_depths(name: str, mtp: int) -> None:
    """Depths add layers to every kind and keep tokens below each window."""
    demand = Demand(131072, 2048, mtp=mtp)
    check(*both(name, 4, 16, demand), demand)


@pytest.mark.parametrize(
    ("block", "kv_dtype", "steps"),
    [(16, "fp8", 2), (128, "fp8", 1), (20, "auto", 2), (8, "auto", 1)],
)
def test_other_pages(block: int, kv_dtype: str, steps: int) -> None:
    """Halved keys and values, a block that does not divide (padded pages), one step in flight."""
    demand = Demand(131072, 4096, steps)
    ours, engine, specs = both("Inkling", 8, block, demand, kv_dtype)
    check(ours, engine, specs, demand)
    assert (block == 20) == any(group.cache.padded_page for group in ours.groups)


def test_every_memory_near_one_request() -> None:
    """The smallest memory that we call enough is the smallest with which vLLM starts."""
    demand = Demand(131072, 2048)
    ours, engine, specs = both("Inkling", 8, 16, demand)
    least = ours.memory_for(1, demand)
    kv_cache_utils.get_kv_cache_configs(engine, [dict(specs)], [least])
    with pytest.raises(ValueError, match="KV cache"):
        kv_cache_utils.get_kv_cache_configs(engine, [dict(specs)], [least - 1])


def test_counted_requests_are_served_by_the_engines_block_manager() -> None:
    """As many requests with a full context as we say decode at once, without one refusal.

    vLLM's manager serves them from exactly the blocks that we ask for: each is admitted only if
    its whole reserve is free, prefills in chunks while the others decode, and reaches its end.
    """
    demand = Demand(context=2048, batch_tokens=512, steps_in_flight=1)
    ours, engine, specs = both("Inkling", 8, 16, demand)
    count = 12
    memory = ours.memory_for(count, demand)
    [config] = kv_cache_utils.get_kv_cache_configs(engine, [dict(specs)], [memory])
    assert config.num_blocks == 1 + ours.reserve(demand) + (count - 1) * ours.held(demand)
    manager = KVCacheManager(
        config,
        max_model_len=demand.context,
        scheduler_block_size=32,
        hash_block_size=4,
        max_in_flight_tokens=demand.in_flight,
        enable_caching=False,
    )
    tokens = 60
    prompt = demand.context - tokens
    requests: list[Request] = []

    def decode() -> None:
        """The start of a step: one token for each running request that is not at its end."""
        for request in requests:
            if request.num_computed_tokens < demand.context:
                request.append_output_token_ids(1)
                assert manager.allocate_slots(request, 1) is not None
                request.num_computed_tokens += 1

    for index in range(count):
        request = Request(str(index), [1] * prompt, SamplingParams(max_tokens=tokens), None)
        while (done := request.num_computed_tokens) < prompt:
            decode()
            chunk = min(demand.batch_tokens, prompt - done)
            slots = manager.allocate_slots(request, chunk, full_sequence_must_fit=not done)
            assert slots is not None
            request.num_computed_tokens += chunk
        requests.append(request)
    for _ in range(tokens):
        decode()
    assert {request.num_computed_tokens for request in requests} == {demand.context}
    # The count is not far too careful either: one block for each group and request is slack.
    held = config.num_blocks - 1 - manager.block_pool.get_num_free_blocks()
    groups = len(config.kv_cache_groups)
    assert count * (ours.held(demand) - groups) <= held <= count * ours.held(demand)
