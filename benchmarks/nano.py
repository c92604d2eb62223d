"""How often portable-nano is right on this machine, by provider, number format and drafting.

    python -m benchmarks.nano [--count 25] [--format bf16|nvfp4|mxfp4|fp8] [--drafts 2]
        [--choose rel_attention=reference,...] [--dtype bfloat16] [--out FILE]

The engine runs in this process, so a table of several rows takes several runs, which add to FILE.
Questions and what is right are those of `inkling-portable eval`; an answer counts when it says what
the question asks for.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import sys
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

from benchmarks.timing import environment
from inkling_portable.commands import eval_media
from inkling_portable.commands import eval_tasks as tasks
from inkling_portable.commands.eval import wilson
from inkling_portable.commands.eval_words import PORTABLE_NANO

SEED = 3
ANSWER_TOKENS = 96


def prompt(case: tasks.Case) -> dict[str, Any]:
    """What the engine is given for a case: ids, and the picture or the sound."""
    import numpy as np
    from PIL import Image

    from training.conversations import case_transcript

    transcript, start = case_transcript(case)
    if not transcript.media:
        return {"prompt_token_ids": transcript.ids[:start]}
    ((place, values),) = transcript.media
    ids = [*transcript.ids[:place], *transcript.ids[place + len(values) : start]]
    part = case.asked[0]["content"][0]
    if part["type"] == "image_url":
        data = base64.b64decode(part["image_url"]["url"].split(",", 1)[1])
        return {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": [Image.open(io.BytesIO(data))]},
        }
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    clip = (samples.astype(np.float32) / 32768, eval_media.RATE)
    return {"prompt_token_ids": ids, "multi_modal_data": {"audio": [clip]}}


def message(text: str) -> dict[str, Any]:
    """The assistant's message in the text of its blocks, special tokens included."""
    found: dict[str, Any] = {"content": None, "reasoning": None, "tool_calls": None}
    text = "<|message_model|>" + text
    for block in re.split(r"<\|message_model\|>", text)[1:]:
        parts = re.match(r"(.*?)<\|content_(\w+)\|>(.*?)<\|end_message\|>", block, re.S)
        if parts is None:
            continue
        _, kind, payload = parts.groups()
        if kind == "invoke_tool_json":
            try:
                call = json.loads(payload)
                function = {"name": call["name"], "arguments": json.dumps(call["args"])}
            except (ValueError, KeyError, TypeError):
                function = {"name": "", "arguments": payload}
            found["tool_calls"] = [*(found["tool_calls"] or []), {"function": function}]
        else:
            found["reasoning" if kind == "thinking" else "content"] = payload
    return found


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Ask everything; shares of right answers by task, speed, and what drafting gained."""
    from vllm import LLM, SamplingParams

    drafting: dict[str, Any] = {}
    if options.drafts:
        method = {"method": "mtp", "num_speculative_tokens": options.drafts}
        drafting = {"speculative_config": method}
    started = time.monotonic()
    llm = LLM(
        str(folder), dtype=options.dtype, max_model_len=1536, max_num_seqs=64,
        kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=options.memory, seed=0,
        enforce_eager=options.eager, disable_log_stats=False, **drafting,
    )  # fmt: skip
    ready = time.monotonic()
    names = [*tasks.TASKS, *eval_media.TASKS]
    draw = [tasks.case if name in tasks.TASKS else eval_media.case for name in names]
    cases = [make(name, i, SEED) for name, make in zip(names, draw, strict=True)
             for i in range(options.count)]  # fmt: skip
    tokenizer = llm.get_tokenizer()
    end = tokenizer.get_vocab()["<|content_model_end_sampling|>"]
    params = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, stop_token_ids=[end], skip_special_tokens=False
    )
    prompts: Any = [prompt(case) for case in cases]
    asked = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - asked
    right = dict.fromkeys(names, 0)
    wrong = []
    for case, out in zip(cases, outputs, strict=True):
        text = tokenizer.decode(out.outputs[0].token_ids, skip_special_tokens=False)
        good = tasks.is_right(case, message(text))
        right[case.task] += good
        if not good:
            wrong.append({"task": case.task, "found": text, "wanted": case.wanted})
    metrics = llm.get_metrics()
    counters = {m.name: m.value for m in metrics if hasattr(m, "value")}
    depths = {m.name: m.values for m in metrics if hasattr(m, "values")}
    accepted = depths.get("vllm:spec_decode_num_accepted_tokens_per_pos", [])
    steps = counters.get("vllm:spec_decode_num_drafts", 0)
    gained = counters.get("vllm:spec_decode_num_accepted_tokens", 0)
    total = sum(right.values())
    return {
        "format": options.format, "dtype": options.dtype, "drafts": options.drafts,
        "choose": options.choose, "asked": options.count, "right": right,
        "share": total / len(cases), "interval": wilson(total, len(cases)),
        "tokens per step": 1 + gained / steps if steps else None,
        "accepted by depth": [round(count / steps, 4) for count in accepted] if steps else None,
        "seconds": round(seconds, 2), "start_seconds": round(ready - started, 1),
        "wrong": wrong[:20],
    }  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nano", description=__doc__)
    parser.add_argument("--count", type=int, default=25, help="questions of each task")
    parser.add_argument("--format", default="bf16", choices=("bf16", "nvfp4", "mxfp4", "fp8"))
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--choose", default="", help="as INKLING_PORTABLE has it")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--memory", type=float, default=0.2, help="share of the GPU's memory")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    # Read when the engine is imported; the counters of drafting are in this process then.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if options.choose:
        os.environ["INKLING_PORTABLE"] = options.choose
    with tempfile.TemporaryDirectory() as scratch:
        folder = PORTABLE_NANO
        if options.format != "bf16":
            from inkling_portable.commands.convert import convert

            folder = Path(scratch) / options.format
            convert(PORTABLE_NANO, folder, options.format)
        found = run(options, folder)
    print(json.dumps({k: v for k, v in found.items() if k != "wrong"}))
    for one in found["wrong"][:5]:
        print("wrong:", json.dumps(one)[:400])
    if options.out:
        report = {"environment": environment(), "results": []}
        if options.out.exists():
            report = json.loads(options.out.read_text())
        report["results"].append(found)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
