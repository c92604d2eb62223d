"""Execute AITER's own expert GEMM behind our row, from a checkout of AITER that is only read.

    git clone --branch v0.1.16 https://github.com/ROCm/aiter
    python -m ci.aiter_executed aiter 0.1.16        adds to docs/numerics/aiter.json
    python ci/generate_numerics.py

AITER imports a GPU's driver and its compiled kernels; the row calls only Triton's. So its Triton
files are imported between bare packages, with a driver that names the chip, and compiled for that
chip. What runs is `routed_experts=aiter` as it is called when serving, our table of pairs included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch

from ci.cdna.launch import CHIPS, executing
from inkling_portable.agreement import disagreements
from inkling_portable.backends.rocm import routed_experts_aiter
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import contract

T = TypeVar("T")
FILE = Path(__file__).resolve().parents[1] / "docs" / "numerics" / "aiter.json"
SEEDS = range(1, 9)
PACKAGES = ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.moe",
            "aiter.ops.triton.moe.moe_routing", "aiter.ops.triton.utils",
            "aiter.ops.triton.utils._triton", "aiter.ops.triton._triton_kernels",
            "aiter.ops.triton._triton_kernels.moe")  # fmt: skip


class Served(SeededDraw):
    """The contract's draws in the format and types that the row serves."""

    def choice(self, values: Sequence[T]) -> T:
        served = [v for v in values if v in ("mxfp4", torch.bfloat16) or v is True]
        return super().choice(served or values)


@contextmanager
def sources(folder: Path, chip: str) -> Iterator[None]:
    """In the block, `aiter` is the Triton part of the checkout, on a machine with `chip`."""
    from triton.runtime import driver

    holder: Any = driver
    before, target = holder._active, SimpleNamespace(arch=chip)
    holder.set_active(SimpleNamespace(get_current_target=lambda: target))
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    try:
        yield
    finally:
        holder._active = before
        for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
            del sys.modules[name]


def execute(folder: Path, chip: str, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """What came out: seeds, faults, and the kernels that ran."""
    op, faults, kernels = contract("routed_experts"), [], set[str]()
    with sources(folder, chip):
        for seed in seeds:
            arguments = op.inputs(Served(seed))
            with executing(chip) as executed:
                try:
                    reports = disagreements(op, routed_experts_aiter.routed_experts, arguments)
                except Exception as error:
                    reports = [f"{type(error).__name__} {' '.join(str(error).split())[:200]}"]
            faults += [f"seed {seed}: {report}" for report in reports]
            kernels |= set(executed.kernels)
    return {"seeds": len(seeds), "faults": faults, "kernels": sorted(kernels)}


def main(argv: list[str]) -> int:
    """Returns 1 if anything disagreed, 2 for a folder that is no checkout."""
    import triton

    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("folder", type=Path)
    p.add_argument("version")
    options = p.parse_args(argv)
    if not (options.folder / "aiter" / "ops" / "triton").is_dir():
        print(f"ci.aiter_executed needs a checkout of AITER; found {options.folder}; name the "
              "folder that holds aiter/ops/triton", file=sys.stderr)  # fmt: skip
        return 2
    found = {chip: execute(options.folder, chip) for chip in CHIPS}
    content = json.loads(FILE.read_text()) if FILE.exists() else {}
    content[options.version] = {"triton": triton.__version__, "chips": found}
    FILE.write_text(json.dumps(dict(sorted(content.items())), indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 1 if any(of["faults"] for of in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
