"""Two nodes by vLLM's own launcher: the recipe's two commands, run as they stand on one machine.

Each believes to be a machine of its own, so what their ranks exchange goes over sockets. What both
have read they find again. One model over both, and a whole one on each.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from inkling_portable.commands._server import Server, free_port
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.recipes import render
from tests.vllm_cpu.conftest import AS_A_USER, Oracle, prompt


@pytest.mark.parametrize("strategy", ["multi_node_tp", "multi_node_tp_dp"])
def test_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    folder = tmp_path / "model"
    write_tiny(folder, preset="small-like", dtype="float32", layers=6)
    lines = render(strategy, str(folder), 1, 2, "127.0.0.1")
    more = ["--dtype", "float32", "--max-model-len", "256", "--block-size", "16",
            "--kv-cache-memory-bytes", str(16 << 20), "--gpu-memory-utilization", "0.05",
            "--max-num-batched-tokens", "48", "--enable-prompt-tokens-details"]  # fmt: skip
    port = "--data-parallel-rpc-port" if strategy.endswith("dp") else "--master-port"
    more += [port, str(free_port())]
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # other tests set it
    first, second = (
        Server(folder, [*line[2:], *more], tmp_path / f"{node}.log",
               {**AS_A_USER, "VLLM_DIST_IDENT": f"node{node}"})
        for node, line in enumerate(lines)
    )  # fmt: skip
    prompts = [prompt(length) for length in (5, 40, 103)]
    asked = {"model": first.name, "prompt": prompts, "max_tokens": 4, "temperature": 0,
             "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    with second, first:
        first.wait_until_ready(150, lambda seconds: None)
        answers = [httpx.post(f"{first.url}/v1/completions", json=asked, timeout=60).json()
                   for _ in range(2)]  # fmt: skip
    oracle = Oracle(folder)
    for answer in answers:
        for ids, choice in zip(prompts, answer["choices"], strict=True):
            oracle.assert_greedy(ids, choice["token_ids"])
    said = (tmp_path / "1.log").read_text()
    if strategy.endswith("dp"):
        assert "EngineCore_DP1" in said
    else:  # the other may be asked what one has read
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        assert "rank=1 local_rank=0" in said
