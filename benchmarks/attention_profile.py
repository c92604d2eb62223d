"""Why a decoding or prefill time of attention is what it is: its parts, and ncu's counters.

    python -m benchmarks.attention_profile [--cases "global 1 x 64K;gate_logits"]
                                           [--out FILE.json] [--raw FILE.csv]

Three times of each shape, in graphs and from cold caches as in `benchmarks.attention`: without keys
(one key a request: launch and plan), without the joining of splits, and whole. Then a second
process runs each shape once under `ncu`, which must be on PATH and allowed to read counters; every
kernel starts there from emptied caches, and joining ones therefore look slower than they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import COPY_GBS, data_sets, own_plan
from benchmarks.attention_cases import CASES, Case, arguments
from benchmarks.small_ops_shapes import RANKS
from benchmarks.small_ops_shapes import arguments as small_arguments
from benchmarks.timing import environment, median_us, need_gpus
from inkling_portable.backends.triton import rel_attention as kernel
from inkling_portable.backends.triton.experts import gate_logits
from inkling_portable.target import Target

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "Occupancy",
            "LaunchStats", "SchedulerStats", "WarpStateStats")  # fmt: skip
# Name in the results -> metrics of which the first that this ncu reports is taken.
METRICS = {
    "us": ("gpu__time_duration.sum",),
    "dram %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",
               "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    "dram GB/s": ("dram__bytes.sum.per_second",),
    "l2 %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "tensor %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
                 "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"),
    "issue %": ("sm__inst_issued.avg.pct_of_peak_sustained_active",
                "smsp__issue_active.avg.pct_of_peak_sustained_active"),
    "registers": ("launch__registers_per_thread",),
    "blocks a unit": ("launch__occupancy_limit_registers",),
    "occupancy %": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}  # fmt: skip
STALL, PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
GATE = "gate_logits"


def calls_of(name: str) -> list[partial[Any]]:
    """The shape's call on each of its data sets, by what serves it."""
    if name == GATE:
        sets = [small_arguments(GATE, 1, RANKS["large-tp8-global"], "cuda") for _ in range(128)]
        return [partial(gate_logits, **call) for call in sets]
    case = next(c for c in CASES if c.name == name)
    serve = partial(kernel.attend, own_plan(case, Target.detect()))
    if "prefill" in case.kind:
        from inkling_portable.backends.cuda import rel_attention_hopper as hopper

        serve = hopper.rel_attention if hopper.serves(**arguments(case, "meta")) else serve
    return [partial(serve, **call) for call in data_sets(case)]


def parts(case: Case) -> dict[str, float]:
    """Times in us: no keys; all but joining, where splits are joined; whole."""
    calls = calls_of(case.name)
    joins = kernel._launch_combine

    def timed() -> float:
        calls[0]()
        torch.cuda.synchronize()
        return median_us(calls)

    found = {"whole": timed()}
    plan = own_plan(case, Target.detect())
    if plan.few is not None:
        kernel._launch_combine = lambda *_: None
        found["not joined"] = timed()
        kernel._launch_combine = joins
    if case.fresh < 64:
        for call in calls:
            call.keywords["kv_lens"].fill_(case.fresh)
        found["no keys"] = timed()
    return found


def under_ncu(names: list[str], raw: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Shape -> its kernels in the order of their launches, with METRICS and stall reasons."""
    command = ["ncu", "--profile-from-start", "off", "--nvtx", "--clock-control", "none", "--csv",
               "--page", "raw", "--print-units", "base",
               *(word for section in SECTIONS for word in ("--section", section)),
               sys.executable, "-m", "benchmarks.attention_profile", "--child",
               "--cases", ";".join(names)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if raw:
        raw.write_text(done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]  # the first holds units
    if not rows:
        sys.exit(f"needs ncu's counters; found {done.stdout[-300:]} {done.stderr[-300:]}; allow "
                 f"this user to read them")  # fmt: skip
    marks = iter(rows)
    for name in names:
        for row in marks:
            if "elementwise" in row["Kernel Name"]:  # what the child puts between shapes
                break
            found[name].append(counters(row))
    return found


def counters(row: dict[str, str]) -> dict[str, Any]:
    """What a row of ncu's raw page says, in the units of METRICS."""
    one: dict[str, Any] = {"kernel": row["Kernel Name"].split("(")[0]}
    for name, metrics in METRICS.items():
        text = next((row[m] for m in metrics if row.get(m)), "")
        if text:
            scale = 1e-3 if name == "us" else 1e-9 if name == "dram GB/s" else 1.0
            one[name] = round(float(text.replace(",", "")) * scale, 2)
    stalls = {key[len(STALL) : -len(PER_ISSUE)]: float(text.replace(",", ""))
              for key, text in row.items()
              if key and key.startswith(STALL) and key.endswith(PER_ISSUE) and text}  # fmt: skip
    total = sum(stalls.values()) or 1.0
    best = sorted(stalls.items(), key=lambda item: -item[1])[:4]
    one["stalls %"] = {key: round(100 * value / total, 1) for key, value in best}
    return one


def child(names: list[str]) -> None:
    """Each shape once for the profiler, after a call that compiles it, and a fill after each."""
    runtime = torch.cuda.cudart()
    mark = torch.zeros(1, device="cuda")
    for name in names:
        calls = calls_of(name)
        calls[0]()
        torch.cuda.synchronize()
        runtime.cudaProfilerStart()
        calls[1]()
        mark.fill_(1.0)
        torch.cuda.synchronize()
        runtime.cudaProfilerStop()
        del calls
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="", help="names, separated by semicolons")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--raw", type=Path, help="where to put all of ncu's numbers")
    parser.add_argument("--child", action="store_true", help="be what ncu looks at")
    chosen = parser.parse_args()
    need_gpus(parser)
    wanted = [part for part in chosen.cases.split(";") if part]
    if chosen.child:
        child(wanted)
        return
    names = [c.name for c in CASES if not wanted or c.name in wanted]
    names += [GATE] if not wanted or GATE in wanted else []
    results: list[dict[str, Any]] = []
    for name in names:
        case = next((c for c in CASES if c.name == name), None)
        us = parts(case) if case else {"whole": median_us(calls_of(name))}
        floor = case.kv_bytes / COPY_GBS / 1e3 if case else 258 * 6144 * 2 / COPY_GBS / 1e3
        results.append({"case": asdict(case) if case else {"name": name, "goal_us": 2.5},
                        "us": us, "floor_us": floor})  # fmt: skip
        print(name, {k: round(v, 1) for k, v in us.items()}, flush=True)
        torch.cuda.empty_cache()
    seen = under_ncu(names, chosen.raw)
    for result in results:
        result["kernels"] = seen[result["case"]["name"]]
        for one in result["kernels"]:
            print(result["case"]["name"], one, flush=True)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps({"environment": environment(), "results": results},
                                         indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
