"""The model through vLLM's engine equals transformers, however the engine cuts the work up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import hf_oracle
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


def assert_computed(
    engine: Engine, answer: Answer, oracle: Oracle, prompts: list[list[int]], count: int
) -> None:
    """Check the next token and `count` greedy ones; `answer` is of what all prompts begin."""
    outputs = engine.computed(prompts, max_tokens=count, logprobs=-1)
    for ids, out in zip(prompts, outputs, strict=True):
        n = len(ids)
        found = dense(out.outputs[0].logprobs)[:1]
        answer.check(found, slice(n - 1, n), f"next token after {n} tokens")
        tokens = list(out.outputs[0].token_ids)
        assert len(tokens) == count
        oracle.assert_greedy(ids, tokens)


def test_prompt_logprobs(cut: Engine, oracle: Oracle) -> None:
    answer = oracle.answer(prompt(LENGTHS[-1]))
    for length in LENGTHS[1:]:
        (found,) = cut.prompt_logprobs([prompt(length)])
        answer.check(found, slice(0, length - 1), f"{length} tokens")


def test_next_token_and_greedy(cut: Engine, oracle: Oracle) -> None:
    answer = oracle.answer(prompt(LENGTHS[-1]))
    for length in LENGTHS:
        assert_computed(cut, answer, oracle, [prompt(length)], 6)


def test_eight_bit_cache(
    engines: Callable[..., Engine], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers with rounded keys and values: nearer by far than rounding moves the result."""
    from transformers.models.inkling import modeling_inkling

    plain_attention, ids = modeling_inkling.eager_attention_forward, prompt(LENGTHS[-1])

    def rounding(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
                 ) -> Any:  # fmt: skip
        key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
        return plain_attention(module, query, key, value, *args, **kwargs)

    plain = oracle.answer(ids).double
    monkeypatch.setattr(modeling_inkling, "eager_attention_forward", rounding)
    rounded = hf_oracle.logits(oracle.double, ids).log_softmax(-1)
    engine = engines(block_size=16, kv_cache_dtype="fp8", max_num_batched_tokens=48)
    (found,) = engine.prompt_logprobs([ids])
    moved = (rounded - plain).abs().max().item()
    apart = (found.double() - rounded[: len(found)]).abs().max().item()
    assert moved > 1e-3
    # Another rounding before the 8-bit one now and then gives the neighbouring code.
    assert apart < moved / 10
    assert engine.on_model(lambda m: m.model.layers[0].attn.keys.dtype) == torch.float8_e4m3fn


def test_sixteen_requests_at_once(engines: Callable[..., Engine], oracle: Oracle) -> None:
    prompts = [prompt(length, seed=1) for length in (*LENGTHS, 7, 40, 64, 200)]
    assert len(prompts) == 16
    assert_computed(engines(block_size=16), oracle.answer(prompts[-1]), oracle, prompts, 8)


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


# Options, and the rows of a conv block, which vLLM enlarges with the page.
HITS = {
    "one shot": ({"block_size": 16}, CONV_BLOCK),
    "chunks of 3": (CUTS["page 32, chunks of 3"], 2 * CONV_BLOCK),
}


@pytest.mark.parametrize("extra", [1, 2, 3, CONV_BLOCK])
@pytest.mark.parametrize("way", HITS)
def test_prefix_hit(engines: Callable[..., Engine], oracle: Oracle, way: str, extra: int) -> None:
    """New tokens behind a hit read convolution states that another request wrote.

    A hit of vLLM's is a multiple of every group's block, so it can only end at a conv block's edge.
    Inside a block, new tokens start with the next chunk or with decoding: chunks of 3 start at each
    offset of a block of 8, and the prompts' ends let decoding start at each offset of one of 4.
    """
    options, block = HITS[way]
    engine = engines(**options)
    bound = engine.on_model(lambda m: {layer.conv_state.block for layer in m.model.layers})
    assert bound == {block}
    engine.forget_prefixes()
    ids = prompt(150 + extra, seed=2)
    engine.greedy([ids[:150]], 1)
    (out,) = engine.generate([ids], max_tokens=6, logprobs=-1)
    assert out.num_cached_tokens == 128  # whole units of 32 and of 64
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
    assert [out.num_cached_tokens for out in outputs[1:]] == [64, 96]
    answer = oracle.answer(prompts[-1])
    for ids, out in zip(prompts, outputs, strict=True):
        n = len(ids)
        answer.check(dense(out.outputs[0].logprobs), slice(n - 1, n), f"{n} tokens")


def test_same_request_twice(engines: Callable[..., Engine], oracle: Oracle) -> None:
    engine = engines(block_size=16)
    engine.forget_prefixes()
    ids = prompt(3 * EXTENT + 7, seed=4)
    for cached in (0, 96):
        (out,) = engine.generate([ids], max_tokens=1, logprobs=-1)
        assert out.num_cached_tokens == cached
        found = dense(out.outputs[0].logprobs)
        oracle.answer(ids).check(found, slice(-1, None), f"{cached} tokens from the cache")


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
