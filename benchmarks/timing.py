"""Time calls as a server meets them: from cold caches, inside a CUDA graph, and say on what.

A kernel that reads a few megabytes is up to a quarter faster when they lie in the L2; so each call
in the captured graph works on its own copy of its data, and the copies exceed four L2s.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

COLD_BYTES = 4 * 60 << 20  # four times the L2 of an H200


def copies(size: int, most: int = 128) -> int:
    """How many data sets of `size` bytes leave the L2 cold; at least 2."""
    return min(most, max(2, -(-COLD_BYTES // max(1, size)) + 1))


def median_us(calls: Sequence[Callable[[], Any]], replays: int = 15, least: int = 20) -> float:
    """Median microseconds of one call in a graph that makes all `calls`, again up to `least`.

    The calls must have run before: what compiles or allocates lazily must not be captured.
    """
    rounds = max(1, -(-least // len(calls)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    del graph
    return statistics.median(times)


def need_gpus(parser: argparse.ArgumentParser, count: int = 1, instead: str = "") -> None:
    """End with one sentence and status 2 where there are fewer; none of them is touched."""
    if (found := torch.cuda.device_count()) < count:
        what = "a GPU" if count == 1 else f"{count} GPUs"
        parser.exit(2, f"{parser.prog}: needs {what}; found {found or 'none'}; run it on a machine "
                       f"that has {'one' if count == 1 else 'them'}{instead}\n")  # fmt: skip


def counts(text: str) -> list[int]:
    """Whole numbers above 0 with commas between them, as the `type` of an option."""
    found = text.split(",") if text else []
    if not all(one.isdecimal() and int(one) for one in found):
        raise argparse.ArgumentTypeError(f"needs numbers above 0, such as 1,16; found {text!r}")
    return [int(one) for one in found]


def environment() -> dict[str, Any]:
    """Date, device, versions, commit and command: what a figure is worth nothing without."""
    import triton

    from inkling_portable.target import Target

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    changed = subprocess.run(["git", "status", "--porcelain", "inkling_portable"],
                             capture_output=True, text=True).stdout  # fmt: skip
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.device_count() else "none",
        "target": str(Target.detect()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.strip() + ("+changes" if changed else ""),
        "command": shlex.join(["python", "-m", *sys.orig_argv[2:]] if "-m" in sys.orig_argv
                              else sys.orig_argv),
    }  # fmt: skip
