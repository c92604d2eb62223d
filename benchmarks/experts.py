"""Time the routed experts from route output to combined output, on one GPU, from a cold cache.

    python -m benchmarks.experts [--models large-tp8,large-tp4,small-tp1,small-tp2]
        [--formats nvfp4,mxfp4,fp8,bf16] [--tokens 1,4,16] [--peers] [--kernels] [--no-check]
        [--tune] [--proxy] [--out FILE]

Each call routes its tokens to other experts (spread routing), so that weights come from memory.
Every timed shape is first held to its contract: the dequantised experts one by one, in float64.
The floor is the bytes of the chosen experts at the chip's bandwidth, or the products at its matrix
rate if that is more. `--peers` times vLLM's Humming and Marlin on the same weights and routing,
`--kernels` adds the time of each kernel, `--tune` tries launch settings of the CUDA kernels first
and reports with the best ones, `--proxy` instead runs the MI300X settings here against what vLLM
does on that chip.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import environment, median_us
from inkling_portable.agreement import disagreements
from inkling_portable.backends.cuda import routed_experts_mma
from inkling_portable.backends.triton import routed_experts as triton_experts
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.registry import contract
from inkling_portable.target import Target

EXPERTS, TOP_K = 256, 6
MODELS = {"large-tp8": (6144, 384), "large-tp4": (6144, 768), "small-tp2": (4096, 1024),
          "small-tp1": (4096, 2048)}  # fmt: skip
FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16")
TOKENS = (1, 2, 4, 9, 16, 36, 64, 256, 1024, 8192)
MATRIX_TFLOPS = 989  # H200, dense bfloat16


def stack(form: str, rows: int, columns: int, device: str) -> tuple[Tensor | None, ...]:
    """(codes, scale, global scale) of all experts; on "meta" without memory."""

    def bytes_of(low: int, high: int, last: int) -> Tensor:
        shape = (EXPERTS, rows, last)
        if device == "meta":
            return torch.empty(shape, dtype=torch.uint8, device=device)
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device)

    def near(value: float, *shape: int) -> Tensor:
        return (torch.rand(shape, device=device) + 0.5) * value

    if form == "nvfp4":
        # 0x30 .. 0x40 are 0.5 .. 2.
        return (bytes_of(0, 256, columns // 2), bytes_of(0x30, 0x41, columns // 16),
                near(0.01, EXPERTS))  # fmt: skip
    if form == "mxfp4":
        return bytes_of(0, 256, columns // 2), bytes_of(119, 122, columns // 32), None
    if form == "fp8":
        codes = bytes_of(0, 0x7F, columns)
        return codes, near(2.0**-11, EXPERTS, rows, 1), None
    if device == "meta":
        return torch.empty(EXPERTS, rows, columns, dtype=torch.bfloat16, device=device), None, None
    values = torch.empty(EXPERTS, rows, columns, dtype=torch.bfloat16, device=device)
    return values.normal_(std=0.02), None, None


def weights_of(model: str, form: str, device: str = "cuda") -> dict[str, Any]:
    """Everything of a call but its tokens."""
    hidden, width = MODELS[model]
    found: dict[str, Any] = {"format": form, "act": "bf16", "interleaved": True}
    for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        parts = stack(form, rows, columns, device)
        found |= {name: parts[0], f"{name}_scale": parts[1], f"{name}_global": parts[2]}
    return found


def tokens_of(hidden: int, tokens: int, count: int, device: str = "cuda") -> list[dict[str, Any]]:
    """`count` sets of x, ids, weights; small steps take experts that no neighbour took."""
    sets = []
    order = torch.randperm(EXPERTS, device=device) if device != "meta" else None
    for i in range(count):
        x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
        if order is None:
            ids = torch.empty(tokens, TOP_K, device=device, dtype=torch.int32)
        elif tokens * TOP_K <= EXPERTS // 2:
            place = torch.arange(tokens * TOP_K, device=device) + i * tokens * TOP_K
            ids = order[place % EXPERTS].view(tokens, TOP_K).int()
        else:
            ids = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K).indices.int()
        sets.append({"x": x, "ids": ids, "weights": torch.rand(tokens, TOP_K, device=device)})
    return sets


def realistic(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Independent tokens: experts that several tokens share occur as often as chance has it."""
    for one in sets:
        scores = torch.rand(one["x"].shape[0], EXPERTS, device=one["x"].device)
        one["ids"] = scores.topk(TOP_K).indices.int()
    return sets


def floor_us(model: str, weights: dict[str, Any], ids: Tensor, bandwidth: float) -> float:
    """Bytes of the distinct experts, x and output once; or the products at the matrix rate."""
    hidden, width = MODELS[model]
    per_expert = sum(v[0].numel() * v.element_size() for k, v in weights.items()
                     if k.startswith(("w13", "w2")) and isinstance(v, Tensor))  # fmt: skip
    moved = per_expert * len(ids.unique()) + 4 * ids.shape[0] * hidden
    products = 2.0 * ids.numel() * 3 * hidden * width
    return max(moved / bandwidth / 1e3, products / MATRIX_TFLOPS / 1e6)


def calls_for(tokens: int) -> int:
    """Calls in one graph: enough that no expert's weights survive in the L2 until used again."""
    return 40 if tokens <= 2 else 12 if tokens <= 64 else 4 if tokens <= 1024 else 2


Provider = Callable[..., Tensor]


def providers(form: str) -> dict[str, Provider]:
    """Ours, by name."""
    found: dict[str, Provider] = {}
    if form in ("nvfp4", "mxfp4") and torch.cuda.get_device_capability() >= (9, 0):
        found["mma"] = routed_experts_mma.routed_experts
    return {**found, "triton": triton_experts.routed_experts}


def measure(model: str, form: str, tokens: int, weights: dict[str, Any], peers: dict[str, Any],
            check: bool, kernels: bool) -> dict[str, Any]:  # fmt: skip
    """One row of the table."""
    hidden, width = MODELS[model]
    sets = tokens_of(hidden, tokens, calls_for(tokens))
    if tokens > 1:
        sets = realistic(sets)
    faults: list[str] = []
    runs: dict[str, list[Callable[[], Tensor]]] = {}
    for name, provider in providers(form).items():
        if check:
            faults += disagreements(contract("routed_experts"), provider, {**weights, **sets[0]})
        runs[name] = [partial(provider, **weights, **one) for one in sets]
    for name, peer in peers.items():
        runs[name] = [partial(peer, one) for one in sets]
    times, temporary = {}, {}
    for name, calls in runs.items():
        for call in calls:
            call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calls[-1]()
        temporary[name] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 2)
        times[name] = round(median_us(calls), 2)
    bandwidth = Target.detect().bandwidth_gbs or 4800
    floors = [floor_us(model, weights, one["ids"], bandwidth) for one in sets]
    row: dict[str, Any] = {
        "op": "routed_experts", "model": model, "hidden": hidden, "width": width, "format": form,
        "tokens": tokens, "distinct": sum(len(one["ids"].unique()) for one in sets) / len(sets),
        "floor_us": round(sum(floors) / len(floors), 2), "us": times, "temporary_mb": temporary,
        "contract": faults or ("holds" if check else "unchecked"),
    }  # fmt: skip
    if kernels:
        row["kernels_us"] = {name: by_kernel(calls) for name, calls in runs.items()}
    return row


def by_kernel(calls: Sequence[Callable[[], Any]]) -> dict[str, float]:
    """Mean device time of one call by kernel name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for call in calls:
            call()
        torch.cuda.synchronize()
    return {e.key[:40]: round(e.self_device_time_total / len(calls), 2)
            for e in found.key_averages() if e.self_device_time_total}  # fmt: skip


def proxy(model: str, tokens_list: list[int]) -> list[dict[str, Any]]:
    """MXFP4 by Triton as an MI300X would launch it, and by unpacking all experts, on this GPU."""
    from benchmarks.experts_peers import whole_stack

    weights, results = weights_of(model, "mxfp4"), []
    peer = whole_stack(weights)
    for tokens in tokens_list:
        sets = realistic(tokens_of(MODELS[model][0], tokens, calls_for(tokens)))
        with launching_for(Target.parse("mi300x")):
            ours = [lambda one=one: triton_experts.routed_experts(**weights, **one) for one in sets]
            got = ours[0]()
            mine = median_us(ours)
        theirs = [lambda one=one: peer(one) for one in sets[:4]]
        difference = (got.float() - theirs[0]().float()).norm() / got.float().norm()
        times = {"triton, MI300X settings": mine, "whole stack": median_us(theirs, 5, 4)}
        results.append({"model": model, "format": "mxfp4", "tokens": tokens, "us": times,
                        "difference": difference.item()})  # fmt: skip
        print(json.dumps(results[-1]), flush=True)
    return results


def write(path: Path | None, results: list[dict[str, Any]]) -> None:
    """After every row, so that a run that is cut short leaves what it has."""
    if path:
        report = {"environment": environment(), "cold": True, "results": results}
        path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="large-tp8")
    parser.add_argument("--formats", default="nvfp4")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--proxy", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    models, forms = asked.models.split(","), asked.formats.split(",")
    tokens_list = [int(n) for n in asked.tokens.split(",")]
    started, results = time.perf_counter(), []
    torch.manual_seed(0)
    if asked.proxy:
        results = [row for model in models for row in proxy(model, tokens_list)]
        write(asked.out, results)
        models = []
    for model, form in itertools.product(models, forms):
        weights, peers = weights_of(model, form), {}
        if asked.peers:
            from benchmarks.experts_peers import peers as vllm

            peers = vllm(MODELS[model][0], weights, TOP_K)
        for tokens in tokens_list:
            settings = {}
            if asked.tune and "mma" in providers(form):
                from benchmarks.experts_tune import tune

                settings = tune(model, weights, tokens)
            row = measure(model, form, tokens, weights, peers, not asked.no_check, asked.kernels)
            results.append(row | ({"settings": settings} if settings else {}))
            write(asked.out, results)
            times = "  ".join(f"{k} {v:.1f}" for k, v in row["us"].items())
            print(f"{model} {form} {tokens} tokens: {times} us  floor {row['floor_us']:.1f}  "
                  f"distinct {row['distinct']:.0f}  {row['contract']}  {settings or ''}  "
                  f"{row.get('kernels_us', '')}", flush=True)  # fmt: skip
        del weights, peers
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
