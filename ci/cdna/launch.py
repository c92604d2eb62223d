"""Launch a kernel on the executor: from assembly and numpy buffers, or in place of Triton's launch.

`executing` makes the package's ops run here: what their launchers would send to a GPU is compiled
for the chip and executed on the CPU tensors that the op was given.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ci.cdna import access, narrow, packed, scalar, vector  # noqa: F401  (they register instructions)
from ci.cdna.machine import BUDGET, Machine
from ci.cdna.memory import Memory
from ci.cdna.parse import CodeError, Program, program
from inkling_portable.code_objects import digest

if TYPE_CHECKING:
    from ci.cross_compile import Job, Launch

CHIPS = {"gfx942": "mi300x", "gfx950": "mi355x"}
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
# Waves held at a time: their registers are 40 MiB, and numpy's overhead is shared by them.
_WAVES = 256
_FORMATS = {"i1": "<b", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I",
            "i64": "<q", "u64": "<Q", "fp32": "<f", "fp64": "<d"}  # fmt: skip


@dataclass
class Executed:
    """What was run: instructions and kernels by name, and what was compiled."""

    instructions: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    jobs: set[Job] = field(default_factory=set)

    def objects(self) -> dict[str, str]:
        """Kernel names by digest of the code objects that were run."""
        from ci.cross_compile import compile_job

        reports = [(job.kernel, compile_job(job)) for job in self.jobs]
        return {digest(report.assembly, report.shared): kernel for kernel, report in reports}


def run_program(
    code: Program, memory: Memory, arguments: bytes, grid: Sequence[int], waves: int, lds: int,
    chip: str, budget: int = BUDGET,
) -> Counter[str]:  # fmt: skip
    """Run all workgroups of `grid`; `arguments` is the kernarg segment's first bytes.

    memory must have been made with the kernarg segment as its last buffer.
    Returns the executed instructions, counted once for each set of waves that ran them together.
    """
    if chip not in LDS_BYTES or lds > LDS_BYTES[chip]:
        raise CodeError(f"needs gfx942 or gfx950 and at most {LDS_BYTES.get(chip, 0)} bytes of "
                        f"LDS; found {chip} and {lds}")  # fmt: skip
    if code.target not in ("", chip):
        raise CodeError(f"needs code for {chip}; found code for {code.target}")
    if len(arguments) < code.kernarg_bytes or memory.sizes[-1] < code.kernarg_bytes:
        raise CodeError(f"needs {code.kernarg_bytes} bytes of arguments, in the last buffer too; "
                        f"found {len(arguments)} and {memory.sizes[-1]}")  # fmt: skip
    if not 0 < waves <= 16 or not all(n > 0 for n in grid):
        raise CodeError(f"needs 1 to 16 waves and a grid without zeros; found {waves}, {grid}")
    for key in ("denorm_mode_32", "denorm_mode_16_64"):
        if code.directives.get("float_" + key, 3) != 3:
            raise CodeError(f"needs float_{key} 3; found {code.directives['float_' + key]}")
    # Scalar registers may be spilled to lanes of vector ones, beside a scratch that nothing uses.
    if code.directives.get("private_segment_fixed_size", 0) and any(
            x.name.startswith("scratch_") for x in code.instructions):  # fmt: skip
        raise CodeError("scratch memory is not supported; the kernel spills")
    sizes = [*grid, 1, 1][:3]
    groups = [(x, y, z) for z in range(sizes[2]) for y in range(sizes[1]) for x in range(sizes[0])]
    kernarg = memory.address(len(memory.sizes) - 1)
    seen: Counter[str] = Counter()
    each = max(1, _WAVES // waves)
    for start in range(0, len(groups), each):
        part = groups[start : start + each]
        machine = Machine(code, memory, len(part), waves, lds, chip, budget, start)
        _start(machine, code, part, waves, kernarg, arguments)
        machine.run()
        seen += machine.seen
    return seen


def _start(m: Machine, code: Program, groups: Sequence[tuple[int, int, int]], waves: int,
           kernarg: int, arguments: bytes) -> None:  # fmt: skip
    """Registers as the hardware leaves them for the first instruction."""

    def put(register: int, value: Any) -> None:
        m.s[register], m.s_known[register] = value, True

    register = 0
    # Pointers to what is not modelled are null: reading there is an access outside every buffer.
    pointers = {"dispatch_ptr": 0, "queue_ptr": 0, "kernarg_segment_ptr": kernarg, "dispatch_id": 0}
    for name, value in pointers.items():
        if code.directives.get(f"user_sgpr_{name}", 0):
            put(register, value & 0xFFFFFFFF)
            put(register + 1, value >> 32)
            register += 2
    if code.directives.get("user_sgpr_private_segment_size", 0):
        raise CodeError("user SGPRs for scratch memory are not supported")
    preload = code.directives.get("user_sgpr_kernarg_preload_length", 0)
    if preload:
        words = np.frombuffer(arguments.ljust(1024, b"\0"), np.uint32)
        skip = code.directives.get("user_sgpr_kernarg_preload_offset", 0)
        for k in range(preload):
            put(register + k, words[skip + k])
        # Code for firmware that does not preload comes first; hardware that does starts after it.
        first = next(i for i, x in enumerate(code.instructions) if x.name == "s_branch")
        m.pc[:] = code.labels[code.instructions[first].operands[0].name]
    register = code.directives.get("user_sgpr_count", 2)
    for axis, name in enumerate("xyz"):
        if code.directives.get(f"system_sgpr_workgroup_id_{name}", name == "x"):
            put(register, np.repeat([group[axis] for group in groups], waves))
            register += 1
    # Workgroups have one dimension: the fields for y and z in the upper bits are zero.
    thread = np.arange(waves)[:, None] * 64 + np.arange(64)
    m.v[0], m.v_known[0] = np.tile(thread, (len(groups), 1)), True


_program = cache(program)


def run_launch(launch: Launch, chip: str, executed: Executed | None = None) -> None:
    """Compile one recorded launch for a chip and execute it on its CPU tensors, in place."""
    import torch

    from ci.cross_compile import compile_job, job

    work = job(launch, chip)
    report = compile_job(work)
    code = _program(report.assembly)
    tensors = [value for value in launch.args if isinstance(value, torch.Tensor)]
    if any(value.device.type != "cpu" for value in tensors):
        raise CodeError("needs tensors in the CPU's memory; found others, so pass .cpu() copies")
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in tensors}
    whole = torch.empty(0, dtype=torch.uint8)
    views = {place: whole.clone().set_(storage).numpy() for place, storage in storages.items()}
    order = list(views)
    kernarg = np.zeros(max(code.kernarg_bytes, 1), np.uint8)
    memory = Memory([*(views[place] for place in order), kernarg])
    given = [one for one in zip(launch.args, work.signature, strict=True)
             if one[1][1] != "constexpr"]  # fmt: skip
    if len(given) > len(code.arguments):
        raise CodeError(f"needs {len(code.arguments)} arguments; found {len(given)}")
    content = bytearray(len(kernarg))
    for (value, (name, kind)), (offset, size, _) in zip(given, code.arguments, strict=False):
        if kind.startswith("*"):
            storage = value.untyped_storage().data_ptr()
            place = memory.address(order.index(storage)) + value.data_ptr() - storage
            content[offset : offset + 8] = struct.pack("<Q", place)
        elif kind in _FORMATS and struct.calcsize(_FORMATS[kind]) == size:
            content[offset : offset + size] = struct.pack(_FORMATS[kind], value)
        else:
            raise CodeError(f"argument {name} of type {kind} in {size} bytes is not supported")
    known = _hidden(launch.grid, report.warps)
    for offset, size, kind in code.arguments[len(given) :]:
        if kind in known:
            content[offset : offset + size] = known[kind].to_bytes(size, "little")
        else:  # reading it is a fault
            start = memory.places[-1] + offset
            memory.inside[start : start + size] = False
    memory.contents(len(order))[:] = np.frombuffer(content, np.uint8)[: len(kernarg)]
    seen = run_program(code, memory, bytes(content), launch.grid, report.warps,
                       report.shared, chip)  # fmt: skip
    for number, place in enumerate(order):
        views[place][:] = memory.contents(number)
    if executed is not None:
        executed.instructions += seen
        executed.kernels[launch.name] += 1
        executed.jobs.add(work)


def _hidden(grid: Sequence[int], waves: int) -> dict[str, int]:
    """Arguments that the runtime adds, as far as modelled; Triton's scratch pointers are null."""
    known = {"global_buffer": 0, "hidden_grid_dims": max(1, sum(n > 1 for n in grid))}
    for axis, blocks, threads in zip("xyz", [*grid, 1, 1], (64 * waves, 1, 1), strict=False):
        known |= {f"hidden_block_count_{axis}": blocks, f"hidden_group_size_{axis}": threads,
                  f"hidden_remainder_{axis}": 0, f"hidden_global_offset_{axis}": 0}  # fmt: skip
    return known


@contextmanager
def executing(chip: str) -> Iterator[Executed]:
    """Execute every launch in the block as `chip`'s code; TRITON_INTERPRET must be 0."""
    from triton.runtime.jit import JITFunction

    from ci.cross_compile import recorded
    from inkling_portable.backends.triton._common import launching_for
    from inkling_portable.target import Target

    executed = Executed()
    with launching_for(Target.parse(CHIPS[chip])), recorded() as launches:
        record: Any = JITFunction.run

        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            record(self, *args, **kwargs)
            run_launch(launches.pop(), chip, executed)

        JITFunction.run = run
        # `recorded` puts the original back.
        yield executed
