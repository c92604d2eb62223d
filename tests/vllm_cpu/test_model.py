"""The model through vLLM's engine equals transformers, however the engine cuts the work up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm_cpu.conftest import Answer, Engine, Oracle, dense, prompt

# Of the text preset.
WINDOW, EXTENT, CONV_BLOCK = 16, 32, 4

LENGTHS = sorted({1, 2, 3, 4, 5, WINDOW - 1, WINDOW, WINDOW + 1, EXTENT - 1, EXTENT, EXTENT + 1,
                  3 * EXTENT + 7})  # fmt: skip

# Page size and chunk: every page size and every chunk once, the smallest chunks on small pages.
CUTS = {
    "page 16, one shot": {"block_size": 16},
    "page 32, one shot": {"block_size": 32},
    "page 128, one shot": {"block_size": 128},
    "page 16, chunks of 1": {"block_size": 16, "max_num_batched_tokens": 1, "max_num_seqs": 1},
    "page 32, chunks of 3": {"block_size": 32, "max_num_batched_tokens": 3, "max_num_seqs": 3},
    "page 128, chunks of 48": {"block_size": 128, "max_num_batched_tokens": 48},
}


@pytest.fixture(params=CUTS, scope="module")
def cut(request: pytest.FixtureRequest, engines: Callable[..., Engine]) -> Engine:
    return engines(**CUTS[request.param])


def assert_same_next(engine: Engine, answer: Answer, prompts: list[list[int]]) -> None:
    """Every prompt is a beginning of the one that `answer` is about."""
    for ids, found in zip(prompts, engine.next_logprobs(prompts), strict=True):
        n = len(ids)
        answer.check(found[None], slice(n - 1, n), f"next token after {n} tokens")


def test_prompt_logprobs(cut: Engine, oracle: Oracle) -> None:
    answer = oracle.answer(prompt(LENGTHS[-1]))
    for length in LENGTHS[1:]:
        (found,) = cut.prompt_logprobs([prompt(length)])
        answer.check(found, slice(0, length - 1), f"{length} tokens")


def test_next_token_and_greedy(cut: Engine, oracle: Oracle) -> None:
    answer = oracle.answer(prompt(LENGTHS[-1]))
    for length in LENGTHS:
        ids = prompt(length)
        assert_same_next(cut, answer, [ids])
        oracle.assert_greedy(ids, cut.greedy([ids], 6)[0])


def test_sixteen_requests_at_once(engines: Callable[..., Engine], oracle: Oracle) -> None:
    engine = engines(block_size=16)
    engine.forget_prefixes()
    prompts = [prompt(length, seed=1) for length in (*LENGTHS, 7, 40, 64, 200)]
    assert len(prompts) == 16
    assert_same_next(engine, oracle.answer(prompts[-1]), prompts)
    for ids, tokens in zip(prompts, engine.greedy(prompts, 8), strict=True):
        oracle.assert_greedy(ids, tokens)


def test_preemption(engines: Callable[..., Engine], oracle: Oracle) -> None:
    # Room for some of the requests only: others wait, and some lose their pages while they grow.
    engine = engines(block_size=16, max_model_len=256, num_gpu_blocks_override=330,
                     enable_prefix_caching=False)  # fmt: skip
    prompts = [prompt(10, seed=seed) for seed in range(24)]
    before = engine.counter("vllm:num_preemptions")
    found = engine.greedy(prompts, 90)
    assert engine.counter("vllm:num_preemptions") > before
    for ids, tokens in zip(prompts, found, strict=True):
        oracle.assert_greedy(ids, tokens)


@pytest.mark.parametrize("extra", [CONV_BLOCK, CONV_BLOCK - 1, 1])
def test_prefix_hit(engines: Callable[..., Engine], oracle: Oracle, extra: int) -> None:
    # Pages of 16 hit in multiples of 32; the new tokens end at a conv block's edge or inside one.
    engine = engines(block_size=16)
    engine.forget_prefixes()
    ids = prompt(96 + extra, seed=2)
    engine.greedy([ids[:96]], 1)
    (out,) = engine.generate([ids], max_tokens=6, logprobs=-1)
    assert out.num_cached_tokens >= 64
    found = dense(out.outputs[0].logprobs)[:1]
    oracle.answer(ids).check(found, slice(-1, None), f"{extra} tokens after the shared ones")
    oracle.assert_greedy(ids, list(out.outputs[0].token_ids))


def test_prefix_shared_within_a_step(engines: Callable[..., Engine], oracle: Oracle) -> None:
    # The second request starts on pages that the first one fills in the very same step.
    engine = engines(block_size=16)
    engine.forget_prefixes()
    prompts = [prompt(length, seed=5) for length in (96, 97, 130)]
    outputs = engine.generate(prompts, max_tokens=1, logprobs=-1)
    assert outputs[0].num_cached_tokens == 0
    assert all(out.num_cached_tokens >= 64 for out in outputs[1:])
    answer = oracle.answer(prompts[-1])
    for ids, out in zip(prompts, outputs, strict=True):
        n = len(ids)
        answer.check(dense(out.outputs[0].logprobs), slice(n - 1, n), f"{n} tokens")


def test_same_request_twice(engines: Callable[..., Engine], oracle: Oracle) -> None:
    engine = engines(block_size=16)
    engine.forget_prefixes()
    ids = prompt(3 * EXTENT + 7, seed=4)
    first, second = engine.next_logprobs([ids]), engine.next_logprobs([ids])
    answer = oracle.answer(ids)
    for found in (*first, *second):
        answer.check(found[None], slice(-1, None), "the same request twice")


def test_memory_of_a_long_prompt(engines: Callable[..., Engine]) -> None:
    # All scores of one global layer at once would take 16 GiB.
    engine = engines(block_size=128, max_model_len=33_024)
    engine.greedy([prompt(8)], 1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = resident("VmRSS")
    engine.greedy([prompt(32_768)], 1)
    assert resident("VmHWM") - before < 2 << 30


def resident(field: str) -> int:
    """Bytes of a field of this process's status, such as the peak of its resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
