"""What the compiler makes of every kernel on each chip, as a file that docs/performance.md shows.

    python -m ci.kernel_table FILE.json [--chips sm90,gfx942]    needs no GPU; minutes on two cores

The launches are those that each chip's tuning picks on the served shapes, recorded from the ops.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.experts import MODELS, tokens_of, weights_of
from benchmarks.small_ops_shapes import LAYERS, OPS, RANKS, arguments
from ci.cross_compile import Job, Launch, Report, compile_job, job, recorded
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.rel_attention import attend
from inkling_portable.registry import Facts
from inkling_portable.target import Target

CHIPS = {"sm90": "h200", "sm100": "b200", "gfx942": "mi300x", "gfx950": "mi355x"}
# One, a few and many rows: both sides of every switch in the tuning functions.
ROWS = ((1, True), (16, True), (64, True), (8192, False))
# Kernels whose shapes differ between ranks are compiled for more than the first.
RANK_NAMES = {"qkvr_prep": ("large-tp8-global", "large-tp8-local", "small-tp1-global")}
# (new tokens, requests, longest, window) of attention; (format, tokens) of routed experts.
ATTENTION = ((1, 1, 65536, 0), (1, 64, 8192, 0), (9, 1, 65536, 0), (16384, 1, 16384, 0),
             (1, 1, 8192, 512), (16384, 1, 16384, 512))  # fmt: skip
EXPERTS = (("nvfp4", 1), ("nvfp4", 9), ("nvfp4", 4096), ("mxfp4", 64), ("bf16", 64))


def launches_for(chip: str) -> list[Launch]:
    """All launches of all small ops on one chip."""
    rows_of_table = {row.op: row for row in OFFERS}
    with launching_for(Target.parse(chip)), recorded() as launches:
        for op in OPS:
            function = rows_of_table[op].load()
            for name in RANK_NAMES.get(op, ("large-tp8-global",)):
                for rows, decode in ROWS:
                    for layer in LAYERS if op == "skinny_linear" else ("qkvr",):
                        if op != "skinny_linear" or rows <= 16:
                            function(**arguments(op, rows, RANKS[name], "meta", decode, layer))
            fixed = rows_of_table[op].under(Facts(batch_invariant=True)).load()
            if fixed is not function:
                fixed(**arguments(op, 16, RANKS["large-tp8-global"], "meta"))
        for rows, decode in ROWS:
            prep = arguments("qkvr_prep", rows, RANKS["large-tp8-global"], "meta", decode)
            stored = torch.float8_e4m3fnuz if chip == CHIPS["gfx942"] else torch.float8_e4m3fn
            caches = {name: prep[name].to(stored) for name in ("k_cache", "v_cache")}
            rows_of_table["qkvr_prep"].load()(**{**prep, **caches})
    return launches


def large_launches_for(chip: str) -> list[Launch]:
    """Launches of attention and of the routed experts, one rank of eight."""
    target = Target.parse(chip)

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with launching_for(target), recorded() as launches:
        for fresh, batch, longest, window in ATTENTION:
            rows, kv_heads = fresh + batch - 1, 2 if window else 1
            cache = tensor(4096, kv_heads, 128, 256).transpose(1, 2)
            attend(
                target, tensor(rows, 8, 128), cache[..., :128], cache[..., 128:],
                tensor(rows, 8, window or 1024), tensor(batch, 8192, dtype=torch.int32),
                tensor(batch + 1, dtype=torch.int32), tensor(batch, dtype=torch.int32),
                fresh, longest, window, 1 / 128, tensor(rows, 8, 128),
            )  # fmt: skip
        experts = next(row for row in OFFERS if row.op == "routed_experts").load()
        for form, tokens in EXPERTS:
            experts(**weights_of("large-tp8", form, "meta"),
                    **tokens_of(MODELS["large-tp8"][0], tokens, 1, "meta")[0])  # fmt: skip
    return launches


def worst(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """One entry for each kernel and chip: its variant with the most registers."""
    found: dict[tuple[str, str], Report] = {}
    for report in reports:
        key = (report.kernel, report.arch)
        if key not in found or report.registers > found[key].registers:
            found[key] = report
    return [
        {
            "kernel": kernel.strip("_"), "chip": arch, "warps": r.warps, "registers": r.registers,
            "agprs": r.accumulators, "spills": r.spills, "shared": r.shared,
            "occupancy": r.occupancy,
        }
        for (kernel, arch), r in sorted(found.items())
    ]  # fmt: skip


def table(chips: Iterable[str]) -> dict[str, Any]:
    """Everything compiled for `chips`: the worst of each kernel, broken limits, refusals."""
    import triton

    reports: list[Report] = []
    refused: list[str] = []
    for arch in chips:
        launches = launches_for(CHIPS[arch]) + large_launches_for(CHIPS[arch])
        work: list[Job] = list(dict.fromkeys(job(launch, arch) for launch in launches))
        for i, one in enumerate(work):
            try:
                reports.append(compile_job(one))
            except Exception as error:  # a compiler's refusal is what this is to find out
                text = " ".join(str(error).split())[:160]
                refused.append(f"{one.kernel} on {arch}: {type(error).__name__} {text}")
            print(f"{arch} {i + 1}/{len(work)} {one.kernel}", file=sys.stderr, flush=True)
    return {
        "triton": triton.__version__,
        "compiled": {arch: sum(r.arch == arch for r in reports) for arch in chips},
        "refused": sorted(set(refused)),
        "faults": sorted({fault for report in reports for fault in report.faults()}),
        "kernels": worst(reports),
    }


def main(argv: list[str]) -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("file", type=Path)
    p.add_argument("--chips", default=",".join(CHIPS))
    options = p.parse_args(argv)
    found = table(options.chips.split(","))
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
