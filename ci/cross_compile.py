"""Compile the package's Triton kernels for chips that are not here, and read the compiler's report.

A kernel is compiled exactly as its launcher would compile it: the launch itself is recorded while
the op runs on tensors without memory (device "meta"), and Triton's own launcher code derives types,
constants and alignment attributes from the recorded arguments. Nothing here needs a GPU.

    with recorded() as launches:
        rms_norm(torch.empty(4, 6144, dtype=torch.bfloat16, device="meta"), ...)
    report = compile_launch(launches[0], "gfx942")
    assert not report.faults()
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ARCHS = ("sm90", "sm100", "gfx942", "gfx950")
SHARED_KIB = {"sm90": 227, "sm100": 227, "gfx942": 64, "gfx950": 160}
# Registers that one SIMD (AMD, per lane) or one SM (NVIDIA) has: what occupancy is reckoned from.
_AMD_VECTOR_REGISTERS = 512
_NVIDIA_REGISTERS = 65536


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch: the kernel's name, its arguments and its grid."""

    kernel: Any
    args: tuple[Any, ...] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Job:
    """What one compilation depends on; plain data, so that another process can do it."""

    module: str
    kernel: str
    arch: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    attributes: tuple[tuple[tuple[int, ...], tuple[tuple[str, int], ...]], ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Report:
    """What the compiler says of one kernel on one chip; sizes in bytes, registers per thread."""

    kernel: str
    arch: str
    warps: int
    registers: int  # architectural VGPRs on AMD
    accumulators: int  # AGPRs on AMD, else 0
    spills: int  # registers that live in memory, VGPRs and SGPRs together
    scratch: int  # private memory per thread
    shared: int
    seconds: float
    assembly: str = field(repr=False)

    @property
    def occupancy(self) -> int:
        """Waves per SIMD (AMD) or warps per SM (NVIDIA) that registers and shared memory allow."""
        shared_limit = SHARED_KIB[self.arch] << 10
        groups = shared_limit // self.shared if self.shared else 1 << 20
        if self.arch.startswith("sm"):
            warp = 32 * max(8, -(-self.registers // 8) * 8)
            return min(64, _NVIDIA_REGISTERS // warp, groups * self.warps)
        vectors = max(8, -(-self.registers // 8) * 8) + -(-self.accumulators // 8) * 8
        return min(8, _AMD_VECTOR_REGISTERS // vectors, max(1, groups * self.warps // 4))

    def count(self, pattern: str) -> int:
        """How many instructions of the assembly match a regular expression."""
        return len(re.findall(pattern, self.assembly))

    def faults(self) -> list[str]:
        """Sentences, one for each limit that the compiled kernel breaks."""
        found = []
        if self.spills:
            found.append(f"{self.spills} registers are spilled")
        if self.scratch:
            found.append(f"{self.scratch} bytes of scratch per thread are used")
        if self.shared > SHARED_KIB[self.arch] << 10:
            found.append(f"{self.shared} bytes of shared memory are used where {self.arch} has "
                         f"{SHARED_KIB[self.arch]} KiB")  # fmt: skip
        return [f"{self.kernel} on {self.arch}: {fault}" for fault in found]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record every launch in the block instead of performing it."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = {p.name for p in self.params}
        options = {k: v for k, v in kwargs.items() if k not in names}
        bound = self.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names})
        bound.apply_defaults()
        size = grid(bound.arguments) if callable(grid) else grid
        values = tuple(bound.arguments.values())
        launches.append(Launch(self, values, options, tuple(int(n) for n in size)))

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def job(launch: Launch, arch: str) -> Job:
    """What Triton's launcher would compile for this launch on a chip of `arch`."""
    kernel = launch.kernel
    backend, bind = _binder(kernel, arch)
    bound, specialization, _ = bind(*launch.args)
    options = {"debug": False, **launch.options}
    _, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, options
    )
    return Job(
        kernel.fn.__module__,
        kernel.fn.__qualname__,
        arch,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple((k, tuple((name, value) for name, value in v)) for k, v in attributes.items()),
        tuple(sorted(options.items())),
    )


@cache
def _binder(kernel: Any, arch: str) -> tuple[Any, Any]:
    """(backend, launcher's binding) of a kernel: Triton writes and compiles the latter as text."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(_gpu_target(arch))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def unlike(work: Iterable[Job], but: tuple[str, ...] = ()) -> list[Job]:
    """One job, the last, of those that differ in the parameters `but` or in alignment only.

    What is left apart: kernel, chip, options, constants (named in capitals) and pointer types.
    """
    found: dict[Any, Job] = {}
    for one in work:
        names = [name for name, _ in one.signature]
        tiles = tuple((name, value) for (at, *_), value in one.constants
                      if (name := names[at]).isupper() and name not in but)  # fmt: skip
        types = tuple(kind for name, kind in one.signature
                      if kind.startswith(("*", "tensordesc")) and name not in but)  # fmt: skip
        found[one.kernel, one.module, one.arch, one.options, tiles, types] = one
    return list(found.values())


def compile_launch(launch: Launch, arch: str) -> Report:
    """Compile in this process; equal jobs are compiled once."""
    return compile_job(job(launch, arch))


@cache
def compile_job(work: Job) -> Report:
    """Compile one job and read its report. Raises what the compiler raises."""
    import importlib

    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kernel: Any = importlib.import_module(work.module)
    for part in work.kernel.split("."):
        kernel = getattr(kernel, part)
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(
        kernel,
        dict(work.signature),
        dict(work.constants),
        {k: [list(pair) for pair in v] for k, v in work.attributes},
    )
    start = time.perf_counter()
    compiled = triton.compile(source, target=_gpu_target(work.arch), options=dict(work.options))
    seconds = time.perf_counter() - start
    read = _read_amd if work.arch.startswith("gfx") else _read_nvidia
    return read(work, compiled, seconds)


def compile_all(launches: Iterable[Launch], archs: Iterable[str] = ARCHS, processes: int = 2,
                but: tuple[str, ...] | None = None) -> list[Report]:  # fmt: skip
    """Compile every launch for every chip, different jobs once, in a small pool of processes.

    With `but`, of jobs that are not `unlike` each other one.
    """
    targets = tuple(archs)
    work = list(dict.fromkeys(job(launch, arch) for launch in launches for arch in targets))
    work = work if but is None else unlike(work, but)
    if processes < 2 or len(work) < 2:
        return [compile_job(one) for one in work]
    # Compilers are not run in the parent beforehand, so forked children start clean.
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        return list(pool.map(compile_job, work))


def _gpu_target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm"):
        return GPUTarget("cuda", int(arch[2:]), 32)
    return GPUTarget("hip", arch, 64)


def _read_amd(work: Job, compiled: Any, seconds: float) -> Report:
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        if found is None:
            raise ValueError(f"the AMD assembly of {work.kernel} states no {key}")
        return int(found[1])

    # With AGPRs in use, .vgpr_count is the sum of both kinds.
    accumulators = number("agpr_count")
    return Report(
        work.kernel,
        work.arch,
        compiled.metadata.num_warps,
        number("vgpr_count") - accumulators,
        accumulators,
        number("vgpr_spill_count") + number("sgpr_spill_count"),
        number("private_segment_fixed_size"),
        compiled.metadata.shared,
        seconds,
        text,
    )


def _read_nvidia(work: Job, compiled: Any, seconds: float) -> Report:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
                               check=True, capture_output=True, text=True).stdout  # fmt: skip
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    # Spilled registers are on the stack; Triton's kernels have nothing else there.
    memory = found["STACK"] + found["LOCAL"]
    return Report(
        work.kernel,
        work.arch,
        compiled.metadata.num_warps,
        found["REG"],
        0,
        memory // 4,
        memory,
        compiled.metadata.shared,
        seconds,
        compiled.asm["ptx"],
    )
