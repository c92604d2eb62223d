"""What sleeping and waking do to the model: weights go and come back, caches are bound anew.

vLLM's CPU build does not sleep (its allocator is CUDA's), so the steps of the protocol are taken
here, a reload through vLLM's own call.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_portable.model.checkpoint import CheckpointError
from inkling_portable.model.engine import CacheLayer
from tests.vllm_cpu.conftest import Engine, prompt

PROMPTS = [prompt(90, seed=8), prompt(33, seed=9)]


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    made = Engine(checkpoint, max_model_len=256)
    yield made
    del made


def answers(engine: Engine) -> list[list[int]]:
    engine.forget_prefixes()
    return engine.greedy(PROMPTS, 12)


def test_weights_that_were_taken_away_and_put_back(engine: Engine) -> None:
    """Level 1: every tensor in the same place, with the same content, after it had none."""
    before = answers(engine)

    def away(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        kept = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.zero_()
        return kept

    def back(model: torch.nn.Module) -> None:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in state.items():
            tensor.copy_(kept[name])

    with torch.inference_mode():
        kept = engine.on_model(away)
        assert answers(engine) != before, "weights are held elsewhere too"
        engine.on_model(back)
    assert answers(engine) == before


def test_caches_that_are_bound_anew(engine: Engine) -> None:
    """Caches come back empty and, if their memory was given up, in another place."""
    before = answers(engine)
    caches: list[CacheLayer] = engine.on_model(
        lambda model: [m for m in model.modules() if isinstance(m, CacheLayer)]
    )
    assert caches

    def elsewhere(cache: torch.Tensor) -> Any:
        new = torch.full((cache.untyped_storage().nbytes() // cache.element_size(),), 0.0)
        return new.to(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())

    places = {cache.kv_cache.data_ptr() for cache in caches}
    for cache in caches:
        cache.kv_cache = elsewhere(cache.kv_cache)
    assert places.isdisjoint(cache.kv_cache.data_ptr() for cache in caches)
    assert answers(engine) == before


def test_weights_that_are_to_be_loaded_again(engine: Engine) -> None:
    """Level 2: vLLM would serve on with what is left of the old ones. Ends the engine's use."""
    sentence = "are loaded once, .* prepares them for a reload .* start the server anew, sleep at"
    with pytest.raises(CheckpointError, match=sentence):
        engine.llm.collective_rpc("reload_weights")
