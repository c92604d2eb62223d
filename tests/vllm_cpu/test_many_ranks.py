"""Four ranks over one KV head of a global layer and two of a local one equal transformers.

So do eight over two and four. Heads are held by two or four ranks each, the convolution states of
the branches are split among all; a prompt that comes again is taken from the cache of prefixes. And
a rank that is lost while two serve ends the server, in time and with an error.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from inkling_portable.commands.tiny import write_tiny
from tests import nursery
from tests.vllm_cpu.conftest import SOFT_BOUND, Oracle, prompt, soften_head


def serve(folder: Path, prompts: list[list[int]], ranks: int) -> list[Any]:
    """Twice: what follows each prompt as log-probabilities, the tokens that did, cached tokens."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="float32", tensor_parallel_size=ranks, max_model_len=256,
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


@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_than_heads(
    checkpoint: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    if ranks == 8:
        write_tiny(tmp_path, num_attention_heads=8, num_key_value_heads=2,
                   swa_num_attention_heads=8, swa_num_key_value_heads=4)  # fmt: skip
        soften_head(tmp_path)
        checkpoint, oracle = tmp_path, Oracle(tmp_path, SOFT_BOUND)
    prompts = [prompt(length) for length in (5, 40, 103)]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # other tests of this suite set it
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    found = nursery.call(serve, checkpoint, prompts, ranks)
    answer = oracle.answer(prompts[-1])
    for again, (rows, tokens, cached) in enumerate(found):
        assert not again or cached[-1] >= 64  # of 103, in blocks of all groups
        for ids, row, generated in zip(prompts, rows, tokens, strict=True):
            n = len(ids)
            answer.check(torch.tensor([row]), slice(n - 1, n), f"{n} tokens on {ranks} ranks")
            oracle.assert_greedy(ids, generated)


def lose(folder: Path, by: int) -> tuple[float, str]:
    """Seconds that two ranks still take after the second got signal `by`, and what is said."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder), dtype="float32", tensor_parallel_size=2, max_model_len=64,
        block_size=16, kv_cache_memory_bytes=16 << 20, gpu_memory_utilization=0.1,
    )  # fmt: skip

    def ask(tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)

    ask(1)
    family = psutil.Process().children(recursive=True)
    # A rank is one of two siblings, whose parent is the engine.
    engines = [one for one in family if sum(two.ppid() == one.pid for two in family) >= 2]
    ranks = sorted(two.pid for two in family if two.ppid() == engines[-1].pid)
    os.kill(ranks[-1], by)
    began = time.monotonic()
    try:
        ask(50)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    found = time.monotonic() - began
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    return found, said


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_ends_the_server(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    """Within a second where it died, and within the time that vLLM is given where it hangs."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("TRITON_INTERPRET", "0"),
                        ("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),
                        ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "4"),
                        ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):  # fmt: skip
        monkeypatch.setenv(name, value)
    seconds, said = nursery.call(lose, checkpoint, int(by))
    assert said.startswith("EngineDeadError")
    assert seconds < (10 if by == signal.SIGKILL else 14)
