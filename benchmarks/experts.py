"""Time the routed experts from route output to combined output, on one GPU, from a cold cache.

    python -m benchmarks.experts [--models large-tp8,large-tp4,small-tp1,small-tp2]
        [--formats nvfp4,mxfp4,fp8,bf16] [--tokens 1,4,16] [--kernels] [--no-check] [--out FILE]
    python -m benchmarks.experts --sweep --seconds 300 [--models ...] [--tokens ...]

Each call routes its tokens to other experts (spread routing), so that weights come from memory.
Every timed shape is first held to its contract: the dequantised experts one by one, in float64.
The floor is the bytes of the chosen experts at the chip's bandwidth, or the products at its matrix
rate if that is more. `--kernels` adds the time of each kernel; `--sweep` tries launch settings,
compiled beforehand in parallel, and prints the best ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import environment, median_us
from inkling_portable.agreement import disagreements
from inkling_portable.backends.triton import routed_experts as module
from inkling_portable.backends.triton.routed_experts_tuning import Rows, Tiling
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


def measure(model: str, form: str, tokens: int, weights: dict[str, Any], check: bool,
            kernels: bool) -> dict[str, Any]:  # fmt: skip
    """One row of the table."""
    hidden, width = MODELS[model]
    sets = tokens_of(hidden, tokens, calls_for(tokens))
    if tokens > 1:
        sets = realistic(sets)
    faults: list[str] = []
    if check:
        faults = disagreements(contract("routed_experts"), module.routed_experts,
                               {**weights, **sets[0]})  # fmt: skip
    calls = [lambda one=one: module.routed_experts(**weights, **one) for one in sets]
    calls[0]()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    calls[-1]()
    temporary = torch.cuda.max_memory_allocated() - before
    bandwidth = Target.detect().bandwidth_gbs or 4800
    floors = [floor_us(model, weights, one["ids"], bandwidth) for one in sets]
    row: dict[str, Any] = {
        "model": model, "hidden": hidden, "width": width, "format": form, "tokens": tokens,
        "distinct": sum(len(one["ids"].unique()) for one in sets) / len(sets),
        "floor_us": sum(floors) / len(floors), "us": {"triton": median_us(calls)},
        "temporary_mb": temporary / 2**20,
        "contract": faults or ("holds" if check else "unchecked"),
    }  # fmt: skip
    if kernels:
        row["kernels_us"] = by_kernel(calls)
    return row


def by_kernel(calls: Sequence[Callable[..., Any]]) -> dict[str, float]:
    """Mean device time of one call by kernel name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for call in calls:
            call()
        torch.cuda.synchronize()
    return {e.key[:40]: round(e.self_device_time_total / len(calls), 2)
            for e in found.key_averages() if e.self_device_time_total}  # fmt: skip


# --- launch settings -----------------------------------------------------------------------------


def tile_choices(form: str, width: int, up: bool) -> Iterator[Tiling]:
    """Settings worth trying for one product."""
    for wide, deep, warps, stages in itertools.product(
        (32, 64, 128), (64, 128, 256), (2, 4, 8), (2, 3, 4, 5)
    ):
        if wide * deep > 128 * 128 or wide // 16 < warps // 2 or (wide == 32 and warps > 4):
            continue
        if not up and width % deep:
            continue
        if stages == 2 and deep < 256:
            continue
        yield Tiling(wide, deep, warps, stages)


def row_choices(up: bool) -> Iterator[Rows]:
    """Settings worth trying for one product without tensor cores: a word for each lane."""
    if up:
        yield from (Rows(e, 32 * w, w) for e in (2, 4, 8, 16) for w in (1, 2, 4))
    else:
        yield from (Rows(e, 32 * w, w) for e in (2, 4, 8) for w in (1, 2))
        yield from (Rows(e, 32, 4) for e in (8, 16))


def trials_of(form: str, width: int, tokens: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(group, replaced functions, description): within a group the fastest is wanted."""
    four = form in ("nvfp4", "mxfp4")
    for up, name in ((True, "w13"), (False, "w2")):
        if four and tokens <= 4:
            for rows in row_choices(up):
                functions = {"gemv_rows": patched(0, up, rows, module.gemv_rows), "GEMV_TO": tokens}
                yield f"rows {name}", functions, str(rows)
        if not four or tokens > 1:
            for tiles in tile_choices(form, width, up):
                functions = {"tiling": patched(1, up, tiles, module.tiling), "GEMV_TO": 0}
                yield f"tiles {name}", functions, str(tiles)


@contextmanager
def chosen(**functions: Any) -> Iterator[None]:
    """Replace the launcher's tuning functions."""
    kept = {name: getattr(module, name) for name in functions}
    for name, value in functions.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def patched(place: int, up: bool, choice: Any, base: Callable[..., Any]) -> Callable[..., Any]:
    """A tuning function whose answer for one product, told by argument `place`, is replaced."""
    return lambda *asked: choice if asked[place] == up else base(*asked)


def _compile(work: Any) -> str:
    from ci.cross_compile import compile_job

    try:
        compile_job(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def precompile(trials: list[tuple[str, str, int, dict[str, Any]]]) -> None:
    """Fill Triton's cache for all trials, in as many processes as there are cores."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from ci.cross_compile import job, recorded

    arch = Target.detect().arch
    work: dict[Any, Any] = {}
    for model, form, tokens, functions in trials:
        with chosen(**functions), recorded() as launches:
            module.routed_experts(**weights_of(model, form, "meta"),
                                  **tokens_of(MODELS[model][0], tokens, 1, "meta")[0])  # fmt: skip
        for launch in launches:
            work[job(launch, arch)] = None
    started = time.perf_counter()
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1),
                             mp_context=get_context("spawn")) as pool:  # fmt: skip
        failed = [r for r in pool.map(_compile, work) if r]
    print(f"{len(work)} kernels compiled in {time.perf_counter() - started:.0f} s, "
          f"{len(failed)} failed", flush=True)  # fmt: skip


def sweep(models: list[str], forms: list[str], tokens_list: list[int], seconds: float
          ) -> list[dict[str, Any]]:  # fmt: skip
    """Best settings of each product for each shape, one product after the other."""
    deadline = time.perf_counter() + seconds
    shapes = list(itertools.product(models, forms, tokens_list))
    precompile([(model, form, tokens, functions) for model, form, tokens in shapes
                for _, functions, _ in trials_of(form, MODELS[model][1], tokens)])  # fmt: skip
    results = []
    weights: dict[str, Any] = {}
    key = None
    for number, (model, form, tokens) in enumerate(shapes):
        if key != (model, form):
            weights, key = {}, (model, form)
            weights = weights_of(model, form)
        sets = tokens_of(MODELS[model][0], tokens, calls_for(tokens))
        sets = realistic(sets) if tokens > 1 else sets
        calls = [lambda one=one, w=weights: module.routed_experts(**w, **one) for one in sets]
        calls[0]()
        default = median_us(calls, 5)
        share = time.perf_counter() + (deadline - time.perf_counter()) / (len(shapes) - number)
        groups: dict[str, list[tuple[float, str]]] = {}
        trials = list(trials_of(form, MODELS[model][1], tokens))
        # Interleaved, so that a deadline leaves some of every group.
        for i in torch.randperm(len(trials)).tolist():
            group, functions, name = trials[i]
            if time.perf_counter() > share:
                break
            with chosen(**functions):
                try:
                    calls[0]()
                    groups.setdefault(group, []).append((median_us(calls, 5), name))
                except Exception as error:
                    print(f"  {name}: {type(error).__name__}", file=sys.stderr)
        for group, table in sorted(groups.items()):
            table.sort()
            results.append({"model": model, "format": form, "tokens": tokens, "group": group,
                            "tried": len(table), "default_us": default,
                            "best": table[:6]})  # fmt: skip
            print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="large-tp8")
    parser.add_argument("--formats", default="nvfp4")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    models, forms = asked.models.split(","), asked.formats.split(",")
    tokens_list = [int(n) for n in asked.tokens.split(",")]
    started, results = time.perf_counter(), []
    torch.manual_seed(0)
    if asked.sweep:
        results = sweep(models, forms, tokens_list, asked.seconds)
    else:
        precompile([(m, f, n, {}) for m, f, n in itertools.product(models, forms, tokens_list)])
        for model, form in itertools.product(models, forms):
            weights = weights_of(model, form)
            for tokens in tokens_list:
                row = measure(model, form, tokens, weights, not asked.no_check, asked.kernels)
                results.append(row)
                times = "  ".join(f"{k} {v:.1f}" for k, v in row["us"].items())
                print(f"{model} {form} {tokens} tokens: {times} us  floor {row['floor_us']:.1f}  "
                      f"distinct {row['distinct']:.0f}  temporary {row['temporary_mb']:.0f} MB  "
                      f"{row['contract']}  {row.get('kernels_us', '')}", flush=True)  # fmt: skip
            del weights
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), "cold": True, "results": results}
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
