"""portable-nano answers right, however it is served: accuracy as a gate.

The model and its questions are ours; what is compared is the engine with itself under options that
must not change a token, and its answers with the right ones.
"""

from __future__ import annotations

import base64
import io
import json
import math
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from inkling_portable.commands import eval_media
from inkling_portable.commands import eval_tasks as tasks
from inkling_portable.commands.convert import convert
from inkling_portable.commands.eval import wilson
from inkling_portable.commands.eval_words import PORTABLE_NANO as FOLDER
from tests.vllm_cpu.conftest import Engine
from training.conversations import case_ids, case_transcript
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

    def get(folder: Path = FOLDER, **options: Any) -> Engine:
        key = f"{folder} {sorted(options.items())}"
        if key not in kept:
            kept.clear()
            kept[key] = Engine(folder, **{**OPTIONS, **options})
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


def wrong(found: list[list[int]]) -> list[str]:
    """Tasks of the answers that are not word for word what training asked for."""
    wanted = [ids[start:] for ids, start in map(case_ids, CASES)]
    return [case.task for case, a, b in zip(CASES, found, wanted, strict=True) if a != b]


def test_answers_are_right(alone: list[list[int]]) -> None:
    """Of 40, one may differ."""
    assert len(CASES) == 40 and len(wrong(alone)) <= 1, wrong(alone)


def shown(case: tasks.Case) -> tuple[dict[str, Any], list[int]]:
    """A prompt with a picture or a sound as the engine takes it, and the right answer's ids."""
    transcript, start = case_transcript(case)
    ((place, values),) = transcript.media
    ids = [*transcript.ids[:place], *transcript.ids[place + len(values) : start]]
    part = case.asked[0]["content"][0]
    if part["type"] == "image_url":
        data = base64.b64decode(part["image_url"]["url"].split(",", 1)[1])
        given: dict[str, Any] = {"image": [Image.open(io.BytesIO(data))]}
    else:
        with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        given = {"audio": [(samples.astype(np.float32) / 32768, eval_media.RATE)]}
    return {"prompt_token_ids": ids, "multi_modal_data": given}, transcript.ids[start:]


def test_pictures_and_sounds_are_understood(nano: Nano) -> None:
    """Of 24, one may be wrong."""
    from vllm import SamplingParams

    cases = [eval_media.case(task, i, SEED) for task in eval_media.TASKS for i in range(8)]
    given, wanted = zip(*map(shown, cases), strict=True)
    params = SamplingParams(temperature=0.0, max_tokens=32, stop_token_ids=[END])
    outputs = nano(enable_prefix_caching=False).llm.generate(list(given), params, use_tqdm=False)
    found = [list(out.outputs[0].token_ids) for out in outputs]
    missed = [c.task for c, a, b in zip(cases, found, wanted, strict=True) if a != b]
    assert len(missed) <= 1, missed


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


def test_an_adapter_beside_them_does_not_change_answers(
    nano: Nano, alone: list[list[int]], tmp_path: Path
) -> None:
    """Every other prompt runs under an adapter that shouts over the query projections."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    dice = torch.Generator().manual_seed(1)
    shapes = {"A": (4, 128), "B": (128, 4)}  # rank 4 between hidden and query widths
    pairs = {
        f"base_model.model.model.llm.layers.{layer}.attn.wq_du.lora_{side}.weight":
            torch.randn(shape, generator=dice)
        for layer in range(12) for side, shape in shapes.items()
    }  # fmt: skip
    save_file(pairs, tmp_path / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    loud = LoRARequest("loud", 1, str(tmp_path))
    engine = nano(enable_lora=True, max_lora_rank=8)
    params = SamplingParams(temperature=0.0, max_tokens=64, stop_token_ids=[END])
    outputs = engine.llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False,
        lora_request=[loud if i % 2 else None for i in range(len(CASES))],
    )  # fmt: skip
    found = [list(out.outputs[0].token_ids) for out in outputs]
    assert found[::2] == alone[::2]
    assert sum(a != b for a, b in zip(found[1::2], alone[1::2], strict=True)) > 10


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8"])
def test_narrow_experts_answer_as_well(nano: Nano, tmp_path: Path, format: str) -> None:
    """Within the interval that 40 right answers of 40 leave."""
    convert(FOLDER, tmp_path / format, format)
    found = answers(nano(tmp_path / format), prompts())
    lowest, _ = wilson(len(CASES), len(CASES))
    right = len(CASES) - len(wrong(found))
    assert right >= lowest * len(CASES), (right, wrong(found))


def test_the_checkpoint_is_what_its_papers_say() -> None:
    """Size, number of parameters, and what training reached on held-out questions."""
    files = sorted(FOLDER.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    count = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    assert count <= 4_000_000
    reached = json.loads((FOLDER / "training.json").read_text())[-1]["right"]
    wanted = tasks.THRESHOLDS | dict.fromkeys(eval_media.TASKS, eval_media.WANTED)
    assert {task for task, share in wanted.items() if reached[task] < share} == set()
    assert reached["tokens per step"] >= 2.0
