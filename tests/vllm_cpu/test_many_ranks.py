"""Four ranks over one KV head of a global layer and two of a local one equal transformers.

Heads are held by two or four ranks each, the convolution states of the branches are split among
all; a prompt that comes again is taken from the cache of prefixes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.vllm_cpu.conftest import Oracle, prompt

SERVE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, prompts = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(folder, dtype="float32", tensor_parallel_size=4, max_model_len=256, block_size=16,
              kv_cache_memory_bytes=32 << 20, gpu_memory_utilization=0.1, max_logprobs=-1,
              max_num_batched_tokens=48)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=-1)
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params,
                               use_tqdm=False)
        first = [out.outputs[0].logprobs[0] for out in outputs]
        rows = [[row[i].logprob for i in range(len(row))] for row in first]
        tokens = [list(out.outputs[0].token_ids) for out in outputs]
        print("answer", json.dumps([rows, tokens, [out.num_cached_tokens for out in outputs]]))
"""


def test_more_ranks_than_heads(checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    prompts = [prompt(length) for length in (5, 40, 103)]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TRITON_INTERPRET": "0"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "serve.py", str(checkpoint), json.dumps(prompts)],
        env={**os.environ, **settings}, capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    found = [json.loads(line.removeprefix("answer ")) for line in done.stdout.splitlines()
             if line.startswith("answer ")]  # fmt: skip
    assert len(found) == 2, done.stderr[-3000:]
    answer = oracle.answer(prompts[-1])
    for again, (rows, tokens, cached) in enumerate(found):
        assert not again or cached[-1] >= 64  # of 103, in blocks of all groups
        for ids, row, generated in zip(prompts, rows, tokens, strict=True):
            n = len(ids)
            answer.check(torch.tensor([row]), slice(n - 1, n), f"{n} tokens on four ranks")
            oracle.assert_greedy(ids, generated)
