"""Every Triton kernel under compute-sanitizer: `python -m ci.memcheck`, on an NVIDIA GPU.

The cases run once without the tool, which fills Triton's cache, and once under it with torch's
caching allocator off, so that a read beyond a tensor is one beyond an allocation. Prints a line for
each op, then the tool's summary; returns 1 if it found anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

TOOL = "compute-sanitizer"


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(op, call) of seeded draws of every contract and of every configuration that is served."""
    from benchmarks import attention_cases, small_ops_shapes
    from inkling_portable.agreement import convert
    from inkling_portable.backends.triton import OFFERS
    from inkling_portable.inputs import SeededDraw
    from inkling_portable.registry import Facts, contract

    for row in OFFERS:
        for facts in (Facts(), Facts(batch_invariant=True))[: 1 + isinstance(row.invariant, str)]:
            function = row.under(facts).load()
            for seed in range(6):
                drawn = contract(row.op).inputs(SeededDraw(seed))
                if drawn.get("act", "bf16") == "bf16":
                    call = {k: convert(v, device="cuda") for k, v in drawn.items()}
                    yield row.op, partial(function, **call)
            if row.op in small_ops_shapes.OPS:
                for rank in ("large-tp8-global", "large-tp8-local"):
                    for rows, decode in ((1, True), (16, True), (300, False)):
                        if row.op != "skinny_linear" or rows <= 16:
                            call = small_ops_shapes.arguments(
                                row.op, rows, small_ops_shapes.RANKS[rank], "cuda", decode
                            )
                            yield row.op, partial(function, **call)
            if row.op == "rel_attention":
                for case in attention_cases.CASES:
                    call = attention_cases.arguments(attention_cases.smaller(case), "cuda")
                    yield row.op, partial(function, **call)


def run_cases() -> None:
    import torch

    last, count, start = "", 0, time.perf_counter()
    for op, call in cases():
        if last and op != last:
            print(f"{last:20} {count:4} calls {time.perf_counter() - start:6.1f} s", flush=True)
            count = 0
        call()
        torch.cuda.synchronize()
        last, count = op, count + 1
    print(f"{last:20} {count:4} calls {time.perf_counter() - start:6.1f} s", flush=True)


def main(argv: list[str]) -> int:
    """Returns 0, 1 for findings or a tool that did not run, or 2 for unknown arguments."""
    if argv == ["cases"]:
        run_cases()
        return 0
    if argv:
        print("usage: python -m ci.memcheck [cases]", file=sys.stderr)
        return 2
    if shutil.which(TOOL) is None:
        print(f"ci.memcheck needs {TOOL}, which is not on PATH; install the CUDA toolkit",
              file=sys.stderr)  # fmt: skip
        return 1
    command = [sys.executable, "-m", "ci.memcheck", "cases"]
    subprocess.run(command, check=True)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tool = [TOOL, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "20"]
    done = subprocess.run([*tool, *command], env=environment)
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
