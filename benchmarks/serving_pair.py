"""A decode step of two tensor-parallel ranks, with one exchange of branches or another.

    python -m benchmarks.serving_pair --exchange lamport [--layers 8] [--tp 4] [--out FILE]
    python -m benchmarks.serving_pair --tiny                 # tries the script, on a CPU

Each of two GPUs holds what one of `--tp` ranks of a released Inkling holds, of its first layers:
dummy weights, drawn routers (`serving_rank.py`), vLLM's offline engine, CUDA graphs. `lamport` and
`triton` are the plugin with that row, `vllm` is vLLM's own model. What is timed is the replay of
a step's graphs on the GPU that started it later, since the other one waits for it; a step has two
exchanges for each layer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import serving, serving_rank

EXCHANGES = ("lamport", "triton", "vllm")
CASES = ((1, 2048), (16, 2048), (64, 512))
STEPS = 40


def watch(worker: Any) -> None:
    """Time every replay of a graph in this worker from now on."""
    import torch

    plain = torch.cuda.CUDAGraph.replay
    worker.timed = []

    def replay(graph: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        plain(graph)
        end.record()
        worker.timed.append((begin, end))

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def replays_us(worker: Any) -> list[float]:
    """Microseconds of each replay since the last question."""
    import torch

    torch.cuda.synchronize()
    found = [begin.elapsed_time(end) * 1e3 for begin, end in worker.timed]
    worker.timed.clear()
    return found


def steps_us(of_ranks: list[list[float]], steps: int) -> tuple[list[float], int]:
    """Microseconds of each step, on the rank where it took less, and its number of replays.

    An engine that schedules ahead may have replayed a step more than it answered. Raises SystemExit
    where nothing was replayed.
    """
    count = min(len(one) for one in of_ranks)
    each = max(1, round(count / steps))
    if count < each:
        raise SystemExit("no graph was replayed, so nothing was timed; use CUDA graphs")
    starts = range(0, count - each + 1, each)
    return [min(sum(one[i : i + each]) for one in of_ranks) for i in starts], each


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases with one exchange."""
    cases = ((1, 96), (4, 48)) if options.tiny else CASES
    config = serving_rank.tiny_config() if options.tiny else serving_rank.rank_config(
        options.model, options.tp // 2, options.layers, "nvfp4"
    )  # fmt: skip
    longest = 512 if options.tiny else max(c for _, c in cases) + serving.BEHIND
    rows = []
    with tempfile.TemporaryDirectory(prefix="inkling-pair-") as scratch:
        described = serving_rank.write(Path(scratch) / "rank", config)
        served = serving.Served(Path(scratch) / "rank", options, longest)
        if not options.tiny:
            served.llm.collective_rpc(watch)
        for batch, context in cases:
            served.settle(batch, context)
            if not options.tiny:
                served.llm.collective_rpc(replays_us)
            began = time.perf_counter()
            for _ in range(STEPS):
                served.step()
            wall = (time.perf_counter() - began) / STEPS * 1e6
            row = {"batch": batch, "context": context, "wall us": round(wall, 1)}
            if not options.tiny:
                times, each = steps_us(served.llm.collective_rpc(replays_us), STEPS)
                row |= {"us": round(statistics.median(times), 1), "replays": each,
                        "fastest us": round(min(times), 1), "steps": len(times)}  # fmt: skip
            served.abort()
            rows.append(row)
            print(json.dumps(row), flush=True)
        layers = described.text.num_layers
        return {"exchange": options.exchange, "layers": layers, "exchanges": 2 * layers,
                "shape": f"a rank of {options.tp}", "rows": rows}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_pair", description=__doc__)
    parser.add_argument("--exchange", choices=EXCHANGES, default="lamport")
    parser.add_argument("--model", default="Inkling")
    parser.add_argument("--tp", type=int, default=4, help="whose ranks' shapes the two have")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--memory", type=float, default=0.2, help="share that has to be free")
    parser.add_argument("--cache", type=int, default=4, metavar="GiB")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.drafts, options.ranks = 0, 2
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions of this file, sent to workers
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    plugin = "" if options.tiny else f"conv_residual_norm={options.exchange}"
    os.environ["INKLING_PORTABLE"] = "off" if options.exchange == "vllm" else plugin
    found = measure(options)
    print(json.dumps(found), flush=True)
    if options.out:
        report = {"environment": serving.about(), "results": []}
        if options.out.exists():
            report = json.loads(options.out.read_text())
        report["results"].append(found)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
