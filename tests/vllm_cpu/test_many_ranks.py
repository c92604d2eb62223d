"""Four ranks over one KV head of a global layer and two of a local one equal transformers.

Heads are held by two or four ranks each, the convolution states of the branches are split among
all; a prompt that comes again is taken from the cache of prefixes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import nursery
from tests.vllm_cpu.conftest import Oracle, prompt


def serve(folder: Path, prompts: list[list[int]]) -> list[Any]:
    """Twice: what follows each prompt as log-probabilities, the tokens that did, cached tokens."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="float32", tensor_parallel_size=4, max_model_len=256,
              block_size=16, kv_cache_memory_bytes=32 << 20, gpu_memory_utilization=0.1,
              max_logprobs=-1, max_num_batched_tokens=48)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=-1)
    found = []
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params,
                               use_tqdm=False)  # fmt: skip
        first = [out.outputs[0].logprobs[0] for out in outputs]
        rows = [[row[i].logprob for i in range(len(row))] for row in first]
        tokens = [list(out.outputs[0].token_ids) for out in outputs]
        found.append((rows, tokens, [out.num_cached_tokens for out in outputs]))
    return found


def test_more_ranks_than_heads(
    checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(length) for length in (5, 40, 103)]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # other tests of this suite set it
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    found = nursery.call(serve, checkpoint, prompts)
    answer = oracle.answer(prompts[-1])
    for again, (rows, tokens, cached) in enumerate(found):
        assert not again or cached[-1] >= 64  # of 103, in blocks of all groups
        for ids, row, generated in zip(prompts, rows, tokens, strict=True):
            n = len(ids)
            answer.check(torch.tensor([row]), slice(n - 1, n), f"{n} tokens on four ranks")
            oracle.assert_greedy(ids, generated)
