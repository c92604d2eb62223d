"""A prompt that one engine has read goes on in another, whose caches came through a connector.

The convolutions' states are a cache of their own group: where they are left out, the second engine
answers something else. The recipe's own connector, NIXL's, moves them between two engines of unlike
splits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from inkling_portable.commands._server import free_port
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.recipes import render
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


def hand_on(folder: Path, prompts: list[list[int]], ranks: tuple[int, int]) -> Any:
    """What follows each prompt by an engine that reads it and by one that was sent its caches.

    The second is asked to go on after a prompt of other ids, and knows the last one only.
    """
    from vllm import LLM, SamplingParams

    engines = []
    lines = render("pd_cluster", str(folder), 1, 1, "localhost")
    for line, size in zip(lines, ranks, strict=True):
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        how = json.loads(line[line.index("--kv-transfer-config") + 1])
        engines.append(LLM(
            str(folder), dtype="float32", max_model_len=256, block_size=16, max_logprobs=-1,
            kv_cache_memory_bytes=32 << 20, gpu_memory_utilization=0.1, seed=0,
            max_num_batched_tokens=48, tensor_parallel_size=size, kv_transfer_config=how,
            enable_prefix_caching=False,
        ))  # fmt: skip

    def ask(engine: Any, asked: list[list[int]], tokens: int, told: list[Any]) -> list[Any]:
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=-1,
                extra_args={"kv_transfer_params": one},
            )
            for one in told
        ]
        given: Any = [{"prompt_token_ids": ids} for ids in asked]
        return engine.generate(given, params, use_tqdm=False)

    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    read = ask(engines[0], prompts, 1, [remote] * len(prompts))
    blind = [[7] * (len(ids) - 1) + ids[-1:] for ids in prompts]
    sent = ask(engines[1], blind, 3, [output.kv_transfer_params for output in read])
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()
    rows = [[o.outputs[0].logprobs[0] for o in outputs] for outputs in (read, sent)]
    logs = [[[row[i].logprob for i in range(len(row))] for row in found] for found in rows]
    return *logs, [list(output.outputs[0].token_ids) for output in sent]


def test_nixl_hands_a_prompt_on_to_more_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a shape whose blocks are as long on one rank as on two, without which vLLM refuses."""
    write_tiny(tmp_path / "model", preset="small-like", dtype="float32", layers=6)
    prompts = [prompt(length) for length in (96, 101, 103, 110)]
    for name, value in (("OMP_NUM_THREADS", "1"), ("TRITON_INTERPRET", "0"),
                        ("VLLM_ENABLE_V1_MULTIPROCESSING", "1"), ("UCX_TLS", "tcp,shm,self"),
                        ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):  # fmt: skip
        monkeypatch.setenv(name, value)
    read, sent, tokens = nursery.call(hand_on, tmp_path / "model", prompts, (1, 2))
    oracle = Oracle(tmp_path / "model")
    for ids, whole, row, generated in zip(prompts, read, sent, tokens, strict=True):
        assert apart(row, whole) < 1e-5, f"{len(ids)} tokens"
        oracle.assert_greedy(ids, generated)
