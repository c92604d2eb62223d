"""Pipeline parallelism through vLLM's executor: two unlike stages on one CPU equal transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm_cpu.conftest import Engine, Oracle, dense, prompt


@pytest.fixture(scope="module")
def staged(checkpoint: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
        built = Engine(checkpoint, max_model_len=256, max_num_batched_tokens=64,
                       pipeline_parallel_size=2)  # fmt: skip
    yield built
    built.llm.llm_engine.engine_core.shutdown()


def test_two_pipeline_stages(staged: Engine, oracle: Oracle) -> None:
    # Chunks of 64 cut the longest prompt.
    ids = prompt(103)
    answer = oracle.answer(ids)
    (found,) = staged.prompt_logprobs([ids])
    answer.check(found, slice(0, -1), "prompt")
    prompts = [ids[:n] for n in (1, 4, 17, 40, 103)]
    for one, rows in zip(prompts, staged.next_logprobs(prompts), strict=True):
        n = len(one)
        answer.check(rows[None], slice(n - 1, n), f"next token after {n} tokens")
    for one, tokens in zip(prompts, staged.greedy(prompts, 6), strict=True):
        oracle.assert_greedy(one, tokens)


def test_a_prompt_that_comes_again_is_found_on_both_stages(staged: Engine, oracle: Oracle) -> None:
    ids = prompt(120, seed=5)
    answer = oracle.answer(ids)
    for again in range(2):
        (out,) = staged.generate([ids], max_tokens=1, logprobs=-1)
        assert (out.num_cached_tokens >= 64) == bool(again)
        answer.check(dense(out.outputs[0].logprobs), slice(119, 120), f"time {again}")
