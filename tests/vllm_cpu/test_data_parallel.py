"""Two data-parallel engines behind one client: each answers as transformers does.

vLLM's experts would have them exchange rows, which it cannot on a CPU, so ours are chosen; a rank
without a request runs along on dummy rows.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from inkling_portable.registry import Facts, choose
from inkling_portable.target import Target
from tests import nursery
from tests.vllm_cpu.conftest import Oracle, prompt


def serve(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Six tokens that follow each prompt: of the first alone, then of the others at once.

    Then the last one's by the second engine, asked twice, and how many it found again.
    """
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    async def ask(engine: AsyncLLM, number: int, name: str, rank: int | None = None) -> Any:
        asked: Any = {"prompt_token_ids": prompts[number]}
        async for output in engine.generate(asked, params, name, data_parallel_rank=rank):
            found = output
        return found

    async def one(engine: AsyncLLM, number: int) -> list[int]:
        return list((await ask(engine, number, str(number))).outputs[0].token_ids)

    async def every() -> tuple[list[list[int]], int]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
            model=str(folder), dtype="float32", data_parallel_size=2, max_model_len=256,
            block_size=16, kv_cache_memory_bytes=32 << 20, gpu_memory_utilization=0.1,
            max_num_batched_tokens=48,
        ))  # fmt: skip
        try:
            alone = await one(engine, 0)
            rest = (one(engine, number) for number in range(1, len(prompts)))
            found = [alone, *await asyncio.gather(*rest)]
            again = [await ask(engine, -1, name, rank=1) for name in ("once", "twice")]
            found += [list(output.outputs[0].token_ids) for output in again]
            return found, again[1].num_cached_tokens
        finally:
            engine.shutdown()

    return asyncio.run(every())


def test_two_engines(checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(length) for length in (5, 40, 70, 103)]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    found, cached = nursery.call(serve, checkpoint, prompts)
    assert cached >= 64  # of 103, in blocks of all groups
    for ids, generated in zip([*prompts, *prompts[-1:] * 2], found, strict=True):
        oracle.assert_greedy(ids, generated)


def test_whose_experts() -> None:
    target = Target.parse("cpu+vllm=0.32.0")
    for dp, provider in ((1, "engine"), (2, "reference")):
        rows = {d.op: d.provider for d in choose(target, Facts(dp=dp)) if d.verdict == "chosen"}
        assert rows["routed_experts"] == provider
