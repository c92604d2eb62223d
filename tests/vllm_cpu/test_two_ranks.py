"""Two ranks together equal transformers, with experts split by width or spread as wholes.

What they have read they find again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inkling_portable.commands.tiny import write_tiny
from tests import nursery
from tests.vllm_cpu.conftest import LARGEST_BOUND, SOFT_BOUND, Oracle, prompt, soften_head
from tests.vllm_cpu.test_quantised import make_twin


def serve(folder: Path, prompts: list[list[int]], options: dict[str, Any]) -> Any:
    """Per prompt, what follows it as log-probabilities, and the tokens that did; the last twice."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="float32", tensor_parallel_size=2, max_model_len=256,
              block_size=16, kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.1,
              max_logprobs=-1, max_num_batched_tokens=48, **options)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1)
    asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    outputs += llm.generate(asked[-1:], params, use_tqdm=False)
    first = [out.outputs[0].logprobs[0] for out in outputs]
    rows = [[row[i].logprob for i in range(len(row))] for row in first]
    return rows, [list(out.outputs[0].token_ids) for out in outputs], outputs[-1].num_cached_tokens


QUANTISED = {"layers": 4, "towers": False, "mtp_depths": 0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"layers": 6}, {}),
    # Attention in FP8, too, in tiles that a rank's share cuts.
    "nvfp4 by width": ({**QUANTISED, "weights": "nvfp4", "layout": "compressed-tensors"}, {}),
    "mxfp4 by expert": ({**QUANTISED, "weights": "mxfp4"}, {"enable_expert_parallel": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    written, options = CASES[case]
    write_tiny(tmp_path / "model", preset="small-like", dtype="float32", **written)
    twin = tmp_path / "model"
    if "weights" in written:
        twin = tmp_path / "twin"
        make_twin(tmp_path / "model", twin)
    else:
        soften_head(twin)  # with its own, two ranks were 1.05e-5 from eager on one CPU
    prompts = [prompt(length) for length in (5, 40, 103)]
    # Each worker gets one core; a machine with one memory node has to be told.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    rows, tokens, cached = nursery.call(serve, tmp_path / "model", prompts, options)
    assert cached >= 64  # of 103, in blocks of all groups
    oracle = Oracle(twin, LARGEST_BOUND if "weights" in written else SOFT_BOUND)
    answer = oracle.answer(prompts[-1])
    for ids, row, generated in zip([*prompts, prompts[-1]], rows, tokens, strict=True):
        n = len(ids)
        answer.check(torch.tensor([row]), slice(n - 1, n), f"{n} tokens on two ranks")
        oracle.assert_greedy(ids, generated)


def test_expert_parallelism_on_a_cpu_is_refused() -> None:
    # vLLM's experts for a CPU index past their weights when a rank holds some of them.
    from inkling_portable.registry import Facts, SelectionError, resolve
    from inkling_portable.target import Target

    target = Target.parse("cpu+vllm=0.32.0")
    assert resolve(target, Facts()).routed_experts is None
    assert resolve(target, Facts(ep=2)).routed_experts is not None
    with pytest.raises(SelectionError, match="expert map of expert parallelism"):
        resolve(target, Facts(ep=2), {"routed_experts": "engine"})


def test_experts_over_data_parallel_ranks_are_the_engines() -> None:
    """Ours have no exchange of tokens: they refuse by name, before a weight is loaded."""
    from types import SimpleNamespace

    from inkling_portable.model.config import ConfigError
    from inkling_portable.model.experts import OwnExperts
    from inkling_portable.registry import Facts, choose
    from inkling_portable.target import Target

    spread = Facts(tp=1, ep=16)
    for machine in ("h200", "mi300x"):
        target = Target.parse(f"{machine}+triton=3.6.0+vllm=0.33.0")
        rows = {d.provider: d for d in choose(target, spread) if d.op == "routed_experts"}
        assert rows["engine"].verdict == "chosen"
        assert rows["triton"].reason == "experts over data-parallel ranks need vLLM's own layer"
    settings = SimpleNamespace(facts=spread, text=None, target=Target.parse("cpu"))
    with pytest.raises(ConfigError, match=r"need ep 1; found 16; ask for routed_experts=engine"):
        OwnExperts(settings, "bf16", None)
