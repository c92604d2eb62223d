"""portable-nano answers right, however it is served: accuracy as a gate.

The model and its questions are ours; what is compared is the engine with itself under options that
must not change a token, and its answers with the right ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from inkling_portable.commands import eval_tasks as tasks
from inkling_portable.commands.eval_words import PORTABLE_NANO as FOLDER
from tests.vllm_cpu.conftest import Engine
from training.conversations import case_ids
from training.tokenizer import special_ids

OPTIONS: dict[str, Any] = {
    "max_model_len": 1536,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 128 << 20,
}
SEED = 2
"""Other questions than those that training was measured with."""
SHORT = [name for name in tasks.TASKS if name != "retrieve at 16x extent"]
CASES = [tasks.case(name, index, SEED) for index in range(4) for name in SHORT][:38]
CASES += [tasks.case("retrieve at 16x extent", index, SEED) for index in range(2)]
END = special_ids()["<|content_model_end_sampling|>"]

Nano = Callable[..., Engine]


@pytest.fixture(scope="module")
def nano() -> Nano:
    """Engines over portable-nano in float32, the last one alone kept alive."""
    kept: dict[str, Engine] = {}

    def get(**options: Any) -> Engine:
        key = repr(sorted(options.items()))
        if key not in kept:
            kept.clear()
            kept[key] = Engine(FOLDER, **{**OPTIONS, **options})
        return kept[key]

    return get


def prompts() -> list[list[int]]:
    return [ids[:start] for ids, start in map(case_ids, CASES)]


def answers(engine: Engine, given: list[list[int]]) -> list[list[int]]:
    """Greedy answers up to and with the end of sampling."""
    outputs = engine.generate(given, max_tokens=64, ignore_eos=False, stop_token_ids=[END])
    return [list(out.outputs[0].token_ids) for out in outputs]


@pytest.fixture(scope="module")
def alone(nano: Nano) -> list[list[int]]:
    """Answers to one prompt at a time, in one chunk, with nothing drafted or remembered."""
    engine = nano(enable_prefix_caching=False)
    return [answers(engine, [ids])[0] for ids in prompts()]


def test_prompts_are_what_the_server_makes_of_messages(nano: Nano) -> None:
    """The trainer's rendering is that of vLLM's encoder."""
    from vllm.renderers.inkling import _HfBackedTmlTokenizer
    from vllm.renderers.inkling_encoding import render_inkling_messages

    tokenizer = _HfBackedTmlTokenizer(nano(enable_prefix_caching=False).llm.get_tokenizer())
    for case in CASES:
        ids, start = case_ids(case)
        given: dict[str, Any] = {"tools": case.tools, "reasoning_effort": 0.9}
        assert render_inkling_messages(case.asked, tokenizer, **given) == ids[:start]
        whole = render_inkling_messages(
            case.messages, tokenizer, add_generation_prompt=False, **given
        )
        assert whole == ids


def test_answers_are_right(alone: list[list[int]]) -> None:
    """Word for word those it was trained to give; of 40, one may differ."""
    wanted = [ids[start:] for ids, start in map(case_ids, CASES)]
    wrong = [case.task for case, a, b in zip(CASES, alone, wanted, strict=True) if a != b]
    assert len(CASES) == 40 and len(wrong) <= 1, wrong


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 96},
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    ],
    ids=["chunks", "drafts"],
)
def test_service_does_not_change_answers(
    nano: Nano, alone: list[list[int]], options: dict[str, Any]
) -> None:
    """All at once, with prompts in chunks or drafts, then again from the prefix cache."""
    engine = nano(**options)
    assert answers(engine, prompts()) == alone
    hits = engine.counter("vllm:prefix_cache_hits")
    assert answers(engine, prompts()) == alone
    assert engine.counter("vllm:prefix_cache_hits") > hits
    if "speculative_config" in options:
        steps = engine.counter("vllm:spec_decode_num_drafts")
        accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
        assert 1 + accepted / steps >= 2.0


def test_the_checkpoint_is_what_its_papers_say() -> None:
    """Size, number of parameters, and what training reached on held-out questions."""
    from safetensors import safe_open

    count = size = 0
    for file in sorted(FOLDER.glob("*.safetensors")):
        size += file.stat().st_size
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                part = tensors.get_slice(name).get_shape()
                total = 1
                for n in part:
                    total *= n
                count += total
    assert count <= 4_000_000 and size <= 8_000_000
    reached = json.loads((FOLDER / "training.json").read_text())[-1]["right"]
    for task, share in tasks.THRESHOLDS.items():
        assert reached[task] >= share, task
    assert reached["tokens per step"] >= 2.0
