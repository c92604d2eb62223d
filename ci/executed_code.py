"""Execute our kernels as gfx942 and gfx950 code and list the digests of what agreed.

    python -m ci.executed_code [--chips gfx942,gfx950] [OP ...]     minutes on one core

Inputs are the seeds of `inkling-portable verify` and the served shapes of the small ops. Code is
listed in inkling_portable/backends/rocm/executed.json under the Triton that compiled it, and only
if every launch of it left its op within its contract; entries of other Tritons stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from benchmarks.small_ops_shapes import OPS, RANKS, arguments
from ci.cdna.launch import CHIPS, executing
from inkling_portable.agreement import disagreements
from inkling_portable.backends.triton import OFFERS
from inkling_portable.code_objects import EXECUTED
from inkling_portable.commands.verify import parser
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import Offer, contract

SEEDS: int = parser("verify", None).get_default("examples")
# Tiles of decode change with the number of rows.
ROWS = (1, 16)
RANK_NAMES = ("large-tp8-global", "large-tp8-local")
# At full width these take minutes on the executor, a matrix's tile being the same at any width.
WIDE = ("gate_logits", "sink_experts", "gated_sinks", "skinny_linear")


def cases(op: str, seeds: Iterable[int] = range(SEEDS), served: bool = True
          ) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """(name, arguments) of every execution of an op."""
    for seed in seeds:
        yield f"seed {seed}", contract(op).inputs(SeededDraw(seed))
    if served and op in OPS and op not in WIDE:
        torch.manual_seed(0)
        for name in RANK_NAMES if op == "qkvr_prep" else RANK_NAMES[:1]:
            for rows in ROWS:
                yield f"{rows} rows, {name}", arguments(op, rows, RANKS[name], "cpu")


def executed(row: Offer, chip: str, inputs: Iterable[tuple[str, dict[str, Any]]]
             ) -> tuple[dict[str, str], list[str]]:  # fmt: skip
    """Kernels by digest of all code that only ever agreed, and what else happened."""
    good: dict[str, str] = {}
    bad: set[str] = set()
    faults: list[str] = []
    for name, values in inputs:
        with executing(chip) as run:
            try:
                reports = disagreements(contract(row.op), row.load(), values)
            except Exception as error:  # an instruction or a shape that cannot be executed
                reports = [f"{type(error).__name__} {' '.join(str(error).split())}"]
        objects = run.objects()
        good.update(objects)
        if reports:
            bad.update(objects)
            faults.append(f"{chip} {row.op}, {name}: {reports[0]}")
    return {found: kernel for found, kernel in good.items() if found not in bad}, faults


def merged(old: dict[str, Any], version: str, chip: str, found: dict[str, str], whole: bool
           ) -> dict[str, Any]:  # fmt: skip
    """The file's content with what was found; `whole`: what is not found again is dropped."""
    kernels: dict[str, set[str]] = {}
    if not whole:
        kernels = {k: set(v) for k, v in old.get(version, {}).get(chip, {}).items()}
    for name, kernel in found.items():
        kernels.setdefault(kernel, set()).add(name)
    listed = {kernel: sorted(names) for kernel, names in sorted(kernels.items())}
    chips = {**old.get(version, {}), chip: listed}
    return dict(sorted({**old, version: dict(sorted(chips.items()))}.items()))


def main(argv: list[str]) -> int:
    """Returns 1 if anything disagreed or could not be executed."""
    import triton

    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("ops", nargs="*", metavar="OP")
    p.add_argument("--chips", default=",".join(CHIPS))
    options = p.parse_args(argv)
    version = triton.__version__.partition("+")[0]
    faults = []
    for chip in options.chips.split(","):
        found: dict[str, str] = {}
        for row in OFFERS:
            if not options.ops or row.op in options.ops:
                objects, wrong = executed(row, chip, cases(row.op))
                found |= objects
                faults += wrong
                print(f"{chip} {row.op}: {len(objects)} code objects", *wrong, sep="\n    ",
                      file=sys.stderr, flush=True)  # fmt: skip
        content = json.loads(EXECUTED.read_text()) if EXECUTED.exists() else {}
        content = merged(content, version, chip, found, not options.ops)
        EXECUTED.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
