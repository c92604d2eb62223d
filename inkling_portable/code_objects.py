"""AMD code objects: which were launched, their digests, and whether CI executed exactly those.

Every machine compiles kernels for itself. What CI has executed on a CPU (`ci/cdna/` of a checkout)
stands in `backends/rocm/executed.json`, by Triton version, chip and kernel; code with another
digest was never executed there, whatever its name.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from inkling_portable.registry import SelectionError
from inkling_portable.target import Target

EXECUTED = Path(__file__).parent / "backends" / "rocm" / "executed.json"
PREFIX = "executed:"
# Where a kernel's source lies, and what debuggers read: they differ between equal code objects.
_DEBUG = re.compile(r"\.(file|loc|ident|cfi_\w+)\b|\.L(tmp|func_begin)\d+:")


def digest(assembly: str, shared: int) -> str:
    """16 hex digits of what a chip gets: Triton's `asm["amdgcn"]` without comments, source places
    and debug sections, and the bytes of LDS that a launch asks for."""
    lines, debug = [f"lds {shared}"], False
    for raw in assembly.splitlines():
        line = " ".join(raw.partition(";")[0].split())
        if line.startswith((".section", ".text", ".amdgpu_metadata")):
            debug = line.startswith(".section .debug")
        if line and not debug and not _DEBUG.match(line):
            lines.append(line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@cache
def executed_in_ci() -> Mapping[str, Mapping[str, Mapping[str, list[str]]]]:
    """Triton version -> chip -> kernel -> digests of the code that CI executed."""
    found: Mapping[str, Mapping[str, Mapping[str, list[str]]]] = json.loads(EXECUTED.read_text())
    return found


def was_executed(found: str) -> bool:
    """Whether CI executed the code with this digest, which holds its chip."""
    return any(found in digests for chips in executed_in_ci().values()
               for kernels in chips.values() for digests in kernels.values())  # fmt: skip


def summary(arch: str) -> str | None:
    """One line on what CI executed of a chip's code; None where there is none."""
    counts = {version: sum(map(len, chips[arch].values()))
              for version, chips in executed_in_ci().items() if arch in chips}  # fmt: skip
    if not counts:
        return None
    shown = ", ".join(f"{count} with Triton {version}" for version, count in counts.items())
    return (f"code objects for {arch} that CI executed on a CPU: {shown}; on the GPU, "
            "`inkling-portable verify` tells which of its own are among them")  # fmt: skip


@contextmanager
def launched() -> Iterator[dict[str, str]]:
    """Kernel names by digest of all AMD code that Triton launches in the block."""
    from triton.runtime.jit import JITFunction

    found: dict[str, str] = {}
    known: dict[int, Any] = {}  # kernels seen, kept alive so that none gets another's number
    launch: Any = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = launch(self, *args, **kwargs)
        if id(kernel) not in known and "amdgcn" in getattr(kernel, "asm", ()):
            known[id(kernel)] = kernel
            found[digest(kernel.asm["amdgcn"], kernel.metadata.shared)] = self.fn.__name__
        return kernel

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = launch


def executor() -> ModuleType:
    """`ci.cdna.launch` of this checkout. Raises SelectionError where it cannot run."""
    root = Path(__file__).parents[1]
    if not (root / "ci" / "cdna" / "launch.py").exists():
        raise SelectionError("--device executed:CHIP needs the executor of a checkout, ci/cdna, "
                             f"and {root} has none; run it in a checkout")  # fmt: skip
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SelectionError("--device executed:CHIP compiles kernels and TRITON_INTERPRET=1 "
                             "interprets them; unset it")  # fmt: skip
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module("ci.cdna.launch")


def executed_target(device: str) -> Target:
    """The machine of `executed:gfx942` or `executed:gfx950`; SelectionError for any other."""
    chips: Mapping[str, str] = executor().CHIPS
    chip = device.removeprefix(PREFIX)
    if not device.startswith(PREFIX) or chip not in chips:
        known = " or ".join(PREFIX + name for name in chips)
        raise SelectionError(f"--device needs {known}; found {device}")
    return replace(Target.parse(chips[chip]), libs=(("triton", metadata.version("triton")),))


@contextmanager
def executing(target: Target) -> Iterator[dict[str, str]]:
    """Launches in the block are executed as `target`'s code on CPU tensors; afterwards, by digest,
    the kernels."""
    found: dict[str, str] = {}
    with executor().executing(target.arch) as executed:
        yield found
    found.update(executed.objects())
