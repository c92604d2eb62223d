"""A prompt that one engine has read goes on in another, whose caches came through a connector.

The convolutions' states are a cache of their own group: where they are left out, the second engine
answers something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import nursery
from tests.vllm_cpu.conftest import Oracle, prompt
from tests.vllm_cpu.memory_connector import MemoryConnector

TRANSFER = {"kv_connector": "MemoryConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "tests.vllm_cpu.memory_connector"}  # fmt: skip


def answers(llm: Any, prompts: list[list[int]], tokens: int) -> list[tuple[list[float], list[int]]]:
    """Log-probabilities of the first token after each prompt, and `tokens` greedy ones."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=-1)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    found = []
    for output in outputs:
        row = output.outputs[0].logprobs[0]
        logs = [row[i].logprob for i in range(len(row))]
        found.append((logs, list(output.outputs[0].token_ids)))
    return found


def serve(folder: Path, prompts: list[list[int]]) -> Any:
    """Answers of the engine that reads the prompts, of one that has their caches sent, of one that
    lacks those of a group at a time; tokens that came by connector; which groups are convolutions'.
    """
    from vllm import LLM

    llm = LLM(str(folder), dtype="float32", max_model_len=256, block_size=16, max_logprobs=-1,
              kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.1, seed=0,
              max_num_batched_tokens=48, enable_prefix_caching=False,
              kv_transfer_config=TRANSFER)  # fmt: skip

    def again(left_out: set[int]) -> Any:
        for cache in MemoryConnector.caches.values():
            cache.fill_(0.25)  # as of another engine: nothing of the prompts
        MemoryConnector.LEFT_OUT = left_out
        return answers(llm, prompts, 3)

    read = answers(llm, prompts, 1)
    loads = len(MemoryConnector.LOADED)
    sent = again(set())
    loaded = MemoryConnector.LOADED[loads:]
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    conv = [i for i, names in enumerate(connector.groups) if all("conv" in n for n in names)]
    without = [again({group}) for group in range(len(connector.groups))]
    return read, sent, loaded, conv, without


def apart(row: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(row, other, strict=True))


def test_a_prompt_goes_on_where_its_caches_were_sent(
    checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last token runs again, wherever it lies in a block of four inputs or of 16 keys.
    prompts = [prompt(length) for length in range(96, 112)]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    read, sent, loaded, conv, without = nursery.call(serve, checkpoint, prompts)
    assert sorted(loaded) == [len(ids) - 1 for ids in prompts]
    for ids, (whole, _), (row, generated) in zip(prompts, read, sent, strict=True):
        assert apart(row, whole) < 1e-5, f"{len(ids)} tokens"
        oracle.assert_greedy(ids, generated)
    assert conv
    for group, found in enumerate(without):
        furthest = max(apart(a[0], b[0]) for a, b in zip(found, sent, strict=True))
        assert furthest > 1e-2, f"group {group} was not needed"
