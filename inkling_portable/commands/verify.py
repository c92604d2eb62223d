"""Hold the kernels of this machine to their contracts on seeded inputs.

Every provider that accepts this machine is compared with the reference in float64, per row. A
failure prints the line that repeats it. Of AMD's chips the digest of each code object is printed,
with "executed" where CI has executed exactly that one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from inkling_portable import code_objects
from inkling_portable.commands._options import OptionParser, new_file, positive
from inkling_portable.registry import Facts, Offer, SelectionError, op_names, ordered_rows
from inkling_portable.target import Target


def parser(name: str, summary: str | None) -> argparse.ArgumentParser:
    """Options that `verify` and `record` share."""
    p = OptionParser(prog=f"inkling-portable {name}", description=summary)
    p.add_argument("ops", nargs="*", metavar="op", help="ops to run; all if none is named")
    p.add_argument("--provider", help="only this provider")
    p.add_argument("--seed", type=int, default=0, help="first seed")
    p.add_argument("--examples", type=positive, default=25, help="seeds for each op")
    p.add_argument("--device", metavar="D", help="executed:gfx942 or executed:gfx950: the code for "
                   "that chip, executed on this CPU; in a checkout")  # fmt: skip
    return p


def device_of(target: Target) -> str:
    """Where tensors live: ROCm's devices are called cuda by torch too."""
    return "cpu" if target.vendor == "cpu" else "cuda"


def machine(device: str | None) -> tuple[Target, str, AbstractContextManager[Mapping[str, str]]]:
    """The target, where tensors live, and a block in which launched AMD kernels are counted.

    device: the option; None is this machine. Raises SelectionError for one that cannot be had.
    """
    if device is not None:
        target = code_objects.executed_target(device)
        return target, "cpu", code_objects.executing(target)
    target = Target.detect()
    if target.vendor != "rocm":
        return target, device_of(target), nullcontext({})
    return target, device_of(target), code_objects.launched()


def runnable(target: Target, ops: Sequence[str], provider: str | None, executed: bool = False
             ) -> Iterator[Offer]:  # fmt: skip
    """The rows that are functions and accept this machine; SelectionError for a bad request."""
    plain = Facts()
    by_format = [plain, *(replace(plain, weights=form) for form in ("nvfp4", "mxfp4", "fp8"))]
    if executed and provider == "reference":
        raise SelectionError("--device executed:CHIP runs kernels, which --provider reference is "
                             "not; leave one of the two out")  # fmt: skip
    unknown = [name for name in ops if name not in op_names()]
    if unknown:
        raise SelectionError(f"unknown op {unknown[0]!r}; ops are {', '.join(op_names())}")
    found = False
    for name in ops or op_names():
        for row in ordered_rows(name, target):
            if row.is_layer or (provider and row.provider != provider):
                continue
            if executed and row.provider == "reference":
                continue
            reason = row.refusal(target, plain)
            if reason is None or any(row.refusal(target, f) is None for f in by_format):
                found = True
                yield row
            elif provider:
                raise SelectionError(f"{name}={provider} cannot run on {target.key}: {reason}")
    if not found:
        rows = [row for name in ops or op_names() for row in ordered_rows(name, target)]
        known = ", ".join(sorted({row.provider for row in rows if not row.is_layer}))
        raise SelectionError(
            f"no op asked for is offered by {provider!r} on {target.key}; providers are {known}"
        )


def main(argv: list[str]) -> int:
    """Returns 0 if all agree, 1 if any does not, 2 for a request that cannot be met."""
    p = parser("verify", __doc__)
    p.add_argument("--out", type=new_file, metavar="FILE", help="write what was found as JSON too")
    options = p.parse_args(argv)
    try:
        target, device, counted = machine(options.device)
        rows = list(runnable(target, options.ops, options.provider, options.device is not None))
    except SelectionError as error:
        print(f"inkling-portable verify: {error}", file=sys.stderr)
        return 2
    where = f"{target}{', executed on this CPU' if options.device else ''}"
    print(f"target {where}")
    with counted as objects:
        agree = [verify_row(row, device, options.seed, options.examples) for row in rows]
    failed = agree.count(False)
    shown = report_objects(objects)
    print("\n".join(shown), end="\n" if shown else "")
    if options.out:
        kernels = [[row.op, row.provider, ok] for row, ok in zip(rows, agree, strict=True)]
        found = {"target": where, "agree": kernels, "code_objects": shown}
        try:
            Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            print(f"inkling-portable verify: {options.out} cannot be written ({error}); name a "
                  "file in a folder that exists and has room", file=sys.stderr)  # fmt: skip
            return 2
    print(f"{len(rows) - failed} of {len(rows)} kernels agree with their contracts")
    return 1 if failed else 0


def report_objects(objects: Mapping[str, str]) -> list[str]:
    """One line for each code object, digest -> kernel, and how many of them CI has executed."""
    executed = {name for name in objects if code_objects.was_executed(name)}
    lines = [f"{kernel.strip('_'):28} {name}  {'executed' if name in executed else 'not executed'}"
             for name, kernel in sorted(objects.items(), key=lambda item: item[::-1])]  # fmt: skip
    if objects:
        lines.append(f"CI executed exactly {len(executed)} of these {len(objects)} code objects")
    return lines


def verify_row(row: Offer, device: str, seed: int, examples: int) -> bool:
    """Run one offer on `examples` seeds; prints one line, and the reproduce line on failure."""
    from inkling_portable.agreement import disagreements
    from inkling_portable.inputs import SeededDraw
    from inkling_portable.registry import contract

    op, function = contract(row.op), row.load()
    began, left = time.monotonic(), list[str]()
    for current in range(seed, seed + examples):
        arguments = op.inputs(SeededDraw(current))
        try:
            reports = disagreements(op, function, arguments, device)
        except Exception as error:  # the other kernels are still to be judged
            if leaves(error, arguments):
                left.append(str(error))
                continue
            last = str(error).strip().splitlines()[-1:]
            reports = [f"raised {type(error).__name__}: {' '.join(last)}"]
        if reports:
            prefix = "TRITON_INTERPRET=1 " if os.environ.get("TRITON_INTERPRET") == "1" else ""
            repeat = f"{row.op} --provider {row.provider} --seed {current} --examples 1"
            print(f"{row.op:20} {row.provider:12} FAILED  {reports[0]}")
            print(f"    {prefix}python -m inkling_portable verify {repeat}")
            return False
    took = time.monotonic() - began
    if len(left) == examples:
        print(f"{row.op:20} {row.provider:12} FAILED  serves no input: {left[-1]}")
        return False
    count = f"{examples - len(left)} examples"
    print(f"{row.op:20} {row.provider:12} agrees  {count}, {took:.1f} s")
    return True


def leaves(error: Exception, arguments: Mapping[str, Any]) -> bool:
    """Whether a kernel refused the weight format of these inputs, which it leaves to others."""
    return isinstance(error, ValueError) and "format" in arguments
