"""A decode step of two tensor-parallel ranks, with one exchange of branches or another.

    python -m benchmarks.serving_pair [--exchanges lamport,triton,vllm] [--layers 16] [--tp 4]
                                      [--cases 1x2048,64x2048] [--out FILE]
    python -m benchmarks.serving_pair --exchanges off        # vLLM's own model
    python -m benchmarks.serving_pair --tiny                 # tries the script, on a CPU

Each of two GPUs holds what one of `--tp` ranks of a released Inkling holds, of its first layers:
dummy weights, drawn routers (`serving_rank.py`), vLLM's offline engine, CUDA graphs. Exchanges are
rows of conv_residual_norm, timed one after another in one engine, which captures its graphs anew
for each. What is timed is the replay of a step's graphs on the GPU that started it later, since
the other one waits for it; a step has two exchanges for each layer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import serving, serving_rank

EXCHANGES, CASES, TINY = "lamport,triton,vllm", "1x2048,16x2048,64x2048", "1x96,4x48"
STEPS = 40


def take(worker: Any, provider: str) -> str | None:
    """End all branches by this row from now on, graphs included; None, or why this rank cannot."""
    import torch

    from inkling_portable.model.engine import gather_from_ranks
    from inkling_portable.model.short_conv import BranchEnd
    from inkling_portable.registry import ordered_rows

    ends = [one for one in worker.get_model().modules() if isinstance(one, BranchEnd)]
    every = {id(ops): ops for end in ends for ops in (end._state[0].ops,)}.values()
    for ops in every:
        rows = ordered_rows("conv_residual_norm", ops.target)
        row = next(row for row in rows if row.provider == provider)
        refusal = row.vote(ops.target, ops.facts, ends[0].group, gather_from_ranks)
        if refusal is not None:
            return refusal
        ops.conv_residual_norm = row.load()
    if torch.cuda.is_available():
        manager = worker.model_runner.cudagraph_manager
        # As long as any graph uses the pool of memory, PyTorch lets others share it.
        worker.earlier = [*getattr(worker, "earlier", ()), *manager.graphs.values()]
        manager.release_graphs()
        worker.model_runner.capture_model()
    return None


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


def cases_of(text: str) -> list[tuple[int, int]]:
    """'1x2048,64x512' -> requests and context of each case."""
    cases = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", case) for case in text.split(",")]
    if not all(cases):
        raise argparse.ArgumentTypeError(f"needs cases such as 1x2048,64x512; found {text!r}")
    return [(int(case[1]), int(case[2])) for case in cases if case]


def measure(served: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases with one exchange."""
    rows = []
    for batch, context in options.cases:
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
    return rows


def every_exchange(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each exchange in one engine, as a row of the results."""
    config = serving_rank.tiny_config() if options.tiny else serving_rank.rank_config(
        options.model, options.tp // 2, options.layers, "nvfp4"
    )  # fmt: skip
    longest = 512 if options.tiny else max(c for _, c in options.cases) + serving.BEHIND
    with tempfile.TemporaryDirectory(prefix="inkling-pair-") as scratch:
        described = serving_rank.write(Path(scratch) / "rank", config)
        served = serving.Served(Path(scratch) / "rank", options, longest)
        if not options.tiny:
            served.llm.collective_rpc(watch)
        layers = described.text.num_layers
        about = {"layers": layers, "exchanges": 2 * layers, "shape": f"a rank of {options.tp}"}
        for exchange in options.exchanges:
            if exchange != options.exchanges[0]:  # with which the engine has started
                refused = served.llm.collective_rpc(take, args=(exchange,))
                if any(refused):
                    print(f"{exchange}: {refused}", flush=True)
                    continue
            yield {"exchange": exchange, **about, "rows": measure(served, options)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_pair", description=__doc__)
    parser.add_argument("--exchanges", help=f"the usual: {EXCHANGES}; or off")
    parser.add_argument("--cases", type=cases_of, help=f"the usual: {CASES}")
    parser.add_argument("--model", default="Inkling")
    parser.add_argument("--tp", type=int, default=4, help="whose ranks' shapes the two have")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--memory", type=float, default=0.2, help="share that has to be free")
    parser.add_argument("--cache", type=int, default=24, metavar="GiB")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.tiny:
        from benchmarks.timing import need_gpus

        need_gpus(parser, 2, ", or try it with --tiny")
    options.drafts, options.ranks, options.seqs = 0, 2, 64
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions of this file, sent to workers
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    usual = "reference" if options.tiny else EXCHANGES
    options.exchanges = (options.exchanges or usual).split(",")
    if unknown := set(options.exchanges) - {*EXCHANGES.split(","), "reference", "off"}:
        parser.error(f"--exchanges takes {EXCHANGES} or off; found {', '.join(unknown)}")
    if options.tiny:  # by default vLLM wants a memory node of its own for every rank on a CPU
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options.cases = options.cases or cases_of(TINY if options.tiny else CASES)
    first = options.exchanges[0]
    os.environ["INKLING_PORTABLE"] = first if first == "off" else f"conv_residual_norm={first}"
    for found in every_exchange(options):
        print(json.dumps(found), flush=True)
        if options.out:
            report: dict[str, Any] = {"environment": serving.about(), "results": []}
            if options.out.exists():
                report = json.loads(options.out.read_text())
            report["results"].append(found)
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
