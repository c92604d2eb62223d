"""Hand-written kernels for the executor: assembled by Triton's own assembler, then executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from triton.backends.amd.compiler import assemble_amdgcn

from ci.cdna.launch import run_program
from ci.cdna.memory import Memory
from ci.cdna.parse import program

Test = TypeVar("Test", bound=Callable[..., None])
TESTED: dict[str, str] = {}
"""Names of instructions and the test that is theirs."""


def of(*names: str) -> Callable[[Test], Test]:
    """Mark a test as the one of these instructions."""

    def mark(test: Test) -> Test:
        TESTED.update(dict.fromkeys(names, test.__name__))
        return test

    return mark


_FRAME = """
.text
.globl k
.p2align 8
.type k,@function
k:
{body}
s_endpgm
.section .rodata,"a",@progbits
.p2align 6
.amdhsa_kernel k
.amdhsa_user_sgpr_kernarg_segment_ptr 1
.amdhsa_user_sgpr_count 2
.amdhsa_group_segment_fixed_size {lds}
.amdhsa_next_free_vgpr 128
.amdhsa_next_free_sgpr 64
.amdhsa_accum_offset 128
.end_amdhsa_kernel
"""
# s[4:7] becomes a buffer of the first argument's memory, v1 four times the thread's number.
PROLOGUE = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
s_mov_b32 s6, 0x7ffffffe
s_mov_b32 s7, 0x27000
s_waitcnt lgkmcnt(0)
"""


def execute(
    body: str, data: np.ndarray[Any, Any], waves: int = 1, chip: str = "gfx942", budget: int = 2000,
    groups: int = 1, lds: int = 1024,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Run PROLOGUE and `body` on a copy of `data`, the kernel's one buffer, and return it.

    s2 holds the workgroup's number.
    """
    text = _FRAME.format(body=PROLOGUE + body, lds=lds)
    assemble_amdgcn(text, chip, "")  # raises where the text is not code of this chip
    kernarg = np.zeros(8, np.uint8)
    memory = Memory([np.ascontiguousarray(data).view(np.uint8).ravel(), kernarg])
    memory.contents(1)[:] = np.array([memory.address(0)], np.uint64).view(np.uint8)
    run_program(program(text), memory, bytes(8), (groups,), waves, lds, chip, budget)
    return memory.contents(0).view(data.dtype).reshape(data.shape)
