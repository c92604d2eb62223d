"""What 8-bit caches gain and batch invariance costs relative attention, on one GPU.

    python -m benchmarks.attention_modes [--cases PART,PART] [--out FILE.json]

Every mode is checked against the contract on the timed shape, then timed cold in a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_cases import CASES, Case, arguments, faults
from benchmarks.timing import copies, environment, median_us, need_gpus
from inkling_portable.backends.triton import rel_attention as kernel
from inkling_portable.backends.triton import rel_attention_fixed as fixed
from inkling_portable.target import Target

NAMES = ("global 1 x 8K", "global 1 x 64K", "global 1 x 256K", "global 64 x 8K",
         "global 512K + 63 x 2K", "verify 9, 64K", "local 1 x 8K", "local 64 x 8K",
         "global prefill 4K", "global 2K on 126K", "local prefill 4K")  # fmt: skip


def eight_bit(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its caches rounded to this chip's 8-bit floats."""
    stored = torch.float8_e4m3fnuz if Target.detect().arch == "gfx942" else torch.float8_e4m3fn
    return {**call, "k_cache": call["k_cache"].to(stored), "v_cache": call["v_cache"].to(stored)}


def right(case: Case, function: Callable[..., Any], call: dict[str, Any]) -> list[str]:
    call["out"].fill_(float("nan"))
    function(**call)
    return faults(case, call)


def measure(case: Case) -> dict[str, Any]:
    """One row of the table: microseconds of each mode, and what broke the contract."""
    size = case.stored_bytes + len(case.lengths) * case.fresh * case.heads * case.extent * 2
    sets = [arguments(case, "cuda", seed) for seed in range(copies(size))]
    eight = [eight_bit(call) for call in sets]
    times, wrong = {}, {}
    for name, function, calls in (
        ("ours", kernel.rel_attention, sets), ("8 bits", kernel.rel_attention, eight),
        ("invariant", fixed.rel_attention, sets), ("invariant, 8 bits", fixed.rel_attention, eight),
    ):  # fmt: skip
        try:
            wrong[name] = right(case, function, calls[0])
            torch.cuda.synchronize()
            times[name] = median_us([lambda c=call, f=function: f(**c) for call in calls])  # type: ignore[misc]
        except Exception as error:
            wrong[name] = [f"{type(error).__name__}: {str(error)[:200]}"]
    return {"case": case.name, "us": times, "right": not any(wrong.values()), "wrong": wrong}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--cases", default="", help="parts of case names, comma-separated; else a set")
    p.add_argument("--out", type=Path, help="JSON file, written after every case")
    options = p.parse_args()
    need_gpus(p)
    parts = [x for x in options.cases.split(",") if x]
    chosen = [
        c for c in CASES if any(x in c.name for x in parts) or (not parts and c.name in NAMES)
    ]
    rows: list[dict[str, Any]] = []
    for case in chosen:
        rows.append(measure(case))
        print(f"{case.name:24}", *(f"{k} {v:.1f}" for k, v in rows[-1]["us"].items()),
              "" if rows[-1]["right"] else rows[-1]["wrong"], sep="  ", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
        if options.out:
            report = {"op": "rel_attention modes", "environment": environment(), "results": rows}
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
